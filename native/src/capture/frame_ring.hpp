// One ring of frames in memory that two processes share: one writes, one reads. docs/flowcheck-capture.md has its layout.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "capture/frame.hpp"

namespace lastgood {

struct FrameRingHeader {
    char magic[8];
    std::uint32_t version;
    std::uint32_t header_bytes;
    std::uint64_t data_bytes;
    std::uint32_t link;
    std::uint32_t unused;
    // The writer's.
    alignas(64) std::atomic<std::uint64_t> head;  // bytes ever written, padding included
    std::atomic<std::uint64_t> sequence;          // frames ever offered, dropped ones included
    std::atomic<std::uint64_t> dropped_frames;
    std::atomic<std::uint64_t> dropped_bytes;
    std::atomic<std::uint32_t> ended;
    // The reader's.
    alignas(64) std::atomic<std::uint64_t> tail;  // bytes ever given back
    std::atomic<std::uint64_t> taken_frames;
    // Bells: a number that changes, and whether somebody sleeps until it does.
    alignas(64) std::atomic<std::uint32_t> filled;
    std::atomic<std::uint32_t> reader_waits;
    alignas(64) std::atomic<std::uint32_t> freed;
    std::atomic<std::uint32_t> writer_waits;
};

constexpr std::size_t frame_ring_header_bytes = 4096;
constexpr std::size_t frame_ring_least_data_bytes = 4 * most_frame_bytes;
static_assert(sizeof(FrameRingHeader) <= 1024, "what follows is the writer's report");
static_assert(std::atomic<std::uint64_t>::is_always_lock_free && std::atomic<std::uint32_t>::is_always_lock_free);

// A view of such a ring. Throws std::invalid_argument where the memory holds none, std::runtime_error where what the
// other side left cannot be.
class FrameRing {
  public:
    // Makes an empty ring of all `nbytes`, which must be zero.
    static void format(unsigned char* memory, std::size_t nbytes, std::uint32_t link);

    // As writer it goes on at the head, as reader at the tail.
    FrameRing(unsigned char* memory, std::size_t nbytes, bool writer);

    // Copies frames into the ring, in order, until one does not fit; with `drop` those that do not are counted as
    // dropped. Returns how many were written or dropped. Frames that lie outside `data_bytes`, or are larger than any may
    // be, are dropped.
    std::size_t write(const unsigned char* data, std::size_t data_bytes, const Frame* table, std::size_t count,
                      bool drop);

    // The same, frame by frame, for who copies by other means: a place for `row.captured` bytes, with its record's header
    // written. Without room: nullptr, and with `drop` it is counted as dropped. All of it appears at `publish`.
    unsigned char* reserve(const Frame& row, bool drop);
    void publish();

    // Waits until the reader gave something back. False: it did not in this time, or a signal came.
    bool wait_freed(double timeout_s);

    void end();

    // Gives the last batch back, and fills up to `limit` rows with offsets from the start of the memory. Waits for the
    // first one. 0: nothing came in this time, or a signal did.
    std::size_t read(Frame* table, std::size_t limit, double timeout_s);

    // The last batch, before the next read.
    void give_back();

    bool ended() const { return header_->ended.load() != 0; }
    bool drained() const { return header_->head.load() == position_; }
    std::uint64_t missing_frames() const { return missing_frames_; }
    const FrameRingHeader& header() const { return *header_; }

  private:
    FrameRingHeader* header_;
    unsigned char* data_;
    std::uint64_t capacity_;
    std::uint64_t position_;  // the head for the writer; for the reader, the end of what was given out
    std::uint64_t sequence_ = 0;
    std::uint64_t given_frames_ = 0;
    std::uint64_t missing_frames_ = 0;
    bool begun_ = false;
    std::uint64_t dropped_frames_ = 0;  // since the last publish
    std::uint64_t dropped_bytes_ = 0;
    std::uint64_t tail_seen_ = 0;
    std::uint32_t freed_seen_ = 0;
};

}  // namespace lastgood

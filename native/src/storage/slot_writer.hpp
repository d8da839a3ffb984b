// Writes one stream of bytes into one slot: chunks from a pool, checksums on the way, several writer threads.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "storage/chunk_pool.hpp"
#include "storage/persistent_memory.hpp"

namespace lastgood {

struct Range {
    std::uintptr_t address;
    std::uint64_t nbytes;
};

struct AcquiredChunk {
    std::uintptr_t address;
    std::uint64_t index;
    std::uint64_t nbytes;
};

// How one stream is written.
struct WriteOptions {
    unsigned writer_threads = 1;
    std::vector<int> cpus;  // writer thread i stays on cpus[i % size]; empty: wherever the kernel likes
    std::string checksum;   // a CRC32C variant by name; "": the fastest
    std::shared_ptr<PersistentMapping> mapping;  // store through it instead of writing to the file
};

class SlotWriter {
  public:
    // Starts the writer threads. `fd` is duplicated. Chunk i goes to data_offset + i * chunk_bytes.
    SlotWriter(std::shared_ptr<ChunkPool> pool, int fd, std::uint64_t data_offset, std::uint64_t stream_bytes,
               std::uint64_t chunk_bytes, std::uint64_t sequence, const WriteOptions& options);

    // Gives up what is unfinished and ends the threads. A thread that the kernel holds inside one write for longer than
    // a few seconds is left to end by itself, with all that it uses.
    ~SlotWriter();

    SlotWriter(const SlotWriter&) = delete;
    SlotWriter& operator=(const SlotWriter&) = delete;

    // Appends the ranges to the stream and returns when nothing needs them any more. With threads > 1, large appends
    // are copied by that many threads.
    void copy_host(const std::vector<Range>& ranges, Clock::time_point deadline, unsigned threads, const Tick& tick);

    // Hands out a buffer for the next chunk of the stream, to be filled by the caller and given to put().
    AcquiredChunk acquire(Clock::time_point deadline, const Tick& tick);
    void put(std::uint64_t index);

    // Waits until every chunk is written and returns the checksums in chunk order.
    std::vector<std::uint32_t> finish(Clock::time_point deadline, const Tick& tick);

    // Stops everything and wakes everybody. Does not wait; join() does, and says whether all threads have ended.
    void abort();
    bool join(Clock::time_point deadline);
    // Whether this is a copy that a fork made, without the threads.
    bool forked() const { return getpid() != owner_; }

    // Gives back the buffers that the caller holds; nothing may write into them any more.
    void release();

    std::uint64_t position() const;
    std::uint64_t stream_bytes() const;

  protected:
    // What the destructor does; for a derived class that must do it before its own end.
    void shut_down();

  private:
    struct State;

    std::shared_ptr<State> state_;
    pid_t owner_;
};

}  // namespace lastgood

#include "capture/frame_ring.hpp"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <stdexcept>

namespace lastgood {
namespace {

constexpr char magic[8] = {'L', 'G', 'F', 'R', 'A', 'M', 'E', 'S'};
constexpr std::uint32_t version = 1;
constexpr std::uint64_t unit = 32;  // a record's header, and what all sizes are multiples of
constexpr std::uint32_t padding = 0xffffffffU;
constexpr double most_wait_s = 600;

struct RecordHeader {
    std::uint64_t sequence;
    std::uint64_t time_ns;
    std::uint32_t captured;  // or `padding`: the rest up to the end is empty
    std::uint32_t length;
    std::uint32_t flags;
    std::uint32_t link;
};
static_assert(sizeof(RecordHeader) == unit);

std::uint64_t record_bytes(std::uint32_t captured) {
    return unit + (std::uint64_t{captured} + unit - 1) / unit * unit;
}

void sleep_on(std::atomic<std::uint32_t>* bell, std::uint32_t seen, double timeout_s) {
    const double wait_s = std::min(std::max(timeout_s, 0.0), most_wait_s);
    timespec time = {};
    time.tv_sec = static_cast<time_t>(std::floor(wait_s));
    time.tv_nsec = static_cast<long>((wait_s - std::floor(wait_s)) * 1e9);
    syscall(SYS_futex, bell, FUTEX_WAIT, seen, &time, nullptr, 0);
}

void ring_bell(std::atomic<std::uint32_t>* bell, std::atomic<std::uint32_t>* waits) {
    bell->fetch_add(1);
    if (waits->load() != 0) syscall(SYS_futex, bell, FUTEX_WAKE, 1, nullptr, nullptr, 0);
}

FrameRingHeader* header_at(unsigned char* memory, std::size_t nbytes) {
    if (nbytes < frame_ring_header_bytes + frame_ring_least_data_bytes ||
        reinterpret_cast<std::uintptr_t>(memory) % 64 != 0) {
        throw std::invalid_argument("too small for a ring of frames, or not aligned");
    }
    return reinterpret_cast<FrameRingHeader*>(memory);
}

}  // namespace

void FrameRing::format(unsigned char* memory, std::size_t nbytes, std::uint32_t link) {
    auto* header = new (header_at(memory, nbytes)) FrameRingHeader();
    header->version = version;
    header->header_bytes = frame_ring_header_bytes;
    header->data_bytes = (nbytes - frame_ring_header_bytes) / unit * unit;
    header->link = link;
    std::memcpy(header->magic, magic, sizeof magic);
}

FrameRing::FrameRing(unsigned char* memory, std::size_t nbytes, bool writer)
    : header_(header_at(memory, nbytes)), data_(memory + frame_ring_header_bytes) {
    if (std::memcmp(header_->magic, magic, sizeof magic) != 0) throw std::invalid_argument("no ring of frames");
    if (header_->version != version || header_->header_bytes != frame_ring_header_bytes) {
        throw std::invalid_argument("a ring of frames of another version");
    }
    capacity_ = header_->data_bytes;
    if (capacity_ % unit != 0 || capacity_ < frame_ring_least_data_bytes / unit * unit ||
        capacity_ > nbytes - frame_ring_header_bytes) {
        throw std::invalid_argument("a ring of frames that says another size than its file has");
    }
    const std::uint64_t head = header_->head.load();
    const std::uint64_t tail = header_->tail.load();
    if (head % unit != 0 || tail % unit != 0 || head - tail > capacity_) {
        throw std::invalid_argument("a ring of frames whose ends are nowhere");
    }
    position_ = writer ? head : tail;
    sequence_ = writer ? header_->sequence.load() : 0;
    tail_seen_ = tail;
}

unsigned char* FrameRing::reserve(const Frame& row, bool drop) {
    const std::uint64_t need = record_bytes(row.captured);
    const std::uint64_t place = position_ % capacity_;
    const std::uint64_t skip = capacity_ - place < need ? capacity_ - place : 0;
    // A tail that cannot be is a reader gone mad: nothing is written over for it.
    const auto fits = [&] {
        const std::uint64_t held = position_ - tail_seen_;
        return held <= capacity_ && skip + need <= capacity_ - held;
    };
    const bool possible = row.captured <= most_frame_bytes;
    if (possible && !fits()) {
        freed_seen_ = header_->freed.load();
        tail_seen_ = header_->tail.load();
    }
    if (!possible || !fits()) {
        if (drop || !possible) {
            ++sequence_;
            ++dropped_frames_;
            dropped_bytes_ += row.captured;
        }
        return nullptr;
    }
    if (skip != 0) {
        RecordHeader rest = {};
        rest.sequence = sequence_;
        rest.captured = padding;
        std::memcpy(data_ + place, &rest, sizeof rest);
        position_ += skip;
    }
    unsigned char* record = data_ + position_ % capacity_;
    const RecordHeader own = {sequence_++, row.time_ns, row.captured, row.length, row.flags, row.link};
    std::memcpy(record, &own, sizeof own);
    position_ += need;
    return record + unit;
}

void FrameRing::publish() {
    header_->sequence.store(sequence_);
    if (dropped_frames_ != 0) {
        header_->dropped_frames.fetch_add(dropped_frames_);
        header_->dropped_bytes.fetch_add(dropped_bytes_);
        dropped_frames_ = dropped_bytes_ = 0;
    }
    if (header_->head.load() != position_) {
        header_->head.store(position_);
        ring_bell(&header_->filled, &header_->reader_waits);
    }
}

std::size_t FrameRing::write(const unsigned char* data, std::size_t data_bytes, const Frame* table, std::size_t count,
                             bool drop) {
    std::size_t done = 0;
    for (; done < count; ++done) {
        const Frame& row = table[done];
        if (row.offset > data_bytes || row.captured > data_bytes - row.offset) {
            ++sequence_;
            ++dropped_frames_;
            continue;
        }
        unsigned char* place = reserve(row, drop);
        if (place != nullptr) {
            std::memcpy(place, data + row.offset, row.captured);
        } else if (!drop && row.captured <= most_frame_bytes) {
            break;
        }
    }
    publish();
    return done;
}

bool FrameRing::wait_freed(double timeout_s) {
    header_->writer_waits.store(1);
    if (header_->freed.load() == freed_seen_) sleep_on(&header_->freed, freed_seen_, timeout_s);
    header_->writer_waits.store(0);
    return header_->freed.load() != freed_seen_;
}

void FrameRing::end() {
    header_->ended.store(1);
    ring_bell(&header_->filled, &header_->reader_waits);
}

void FrameRing::give_back() {
    if (header_->tail.load() == position_) return;
    header_->taken_frames.fetch_add(given_frames_);
    given_frames_ = 0;
    header_->tail.store(position_, std::memory_order_release);
    ring_bell(&header_->freed, &header_->writer_waits);
}

std::size_t FrameRing::read(Frame* table, std::size_t limit, double timeout_s) {
    const std::uint64_t oldest = header_->tail.load();
    if (header_->head.load() - oldest > capacity_) {
        throw std::runtime_error("the ring was overrun: its writer went over frames that were not given back");
    }
    give_back();
    std::uint64_t head = header_->head.load(std::memory_order_acquire);
    if (head == position_) {
        const std::uint32_t seen = header_->filled.load();
        header_->reader_waits.store(1);
        if (header_->head.load() == position_ && header_->ended.load() == 0) {
            sleep_on(&header_->filled, seen, timeout_s);
        }
        header_->reader_waits.store(0);
        head = header_->head.load(std::memory_order_acquire);
    }
    if (head - position_ > capacity_ || head % unit != 0) {
        throw std::runtime_error("the ring's head is nowhere: something else wrote into it");
    }
    std::size_t count = 0;
    while (position_ != head && count < limit) {
        const std::uint64_t place = position_ % capacity_;
        RecordHeader record;
        std::memcpy(&record, data_ + place, sizeof record);
        if (record.captured == padding) {
            const std::uint64_t rest = capacity_ - place;
            if (rest > head - position_) throw std::runtime_error("padding beyond the ring's head");
            position_ += rest;
            continue;
        }
        const std::uint64_t size = record_bytes(record.captured);
        if (record.captured > most_frame_bytes || size > capacity_ - place || size > head - position_ ||
            (begun_ && record.sequence < sequence_)) {
            throw std::runtime_error("a frame in the ring that its writer cannot have written");
        }
        if (begun_) missing_frames_ += record.sequence - sequence_;
        begun_ = true;
        sequence_ = record.sequence + 1;
        table[count++] = {frame_ring_header_bytes + place + unit, record.captured, record.length, record.time_ns,
                          record.flags,                           record.link};
        position_ += size;
    }
    given_frames_ += count;
    return count;
}

}  // namespace lastgood

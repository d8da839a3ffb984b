// A fixed number of equal, aligned buffers, shared by all checkpoints in flight.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "storage/os_io.hpp"

namespace lastgood {

class ChunkPool {
  public:
    // Cuts [address, address + nbytes) into buffers; with address 0 the pool maps memory of its own. Memory that is
    // given stays the caller's and must outlive the pool.
    ChunkPool(std::uintptr_t address, std::size_t nbytes, std::size_t chunk_bytes);

    // Takes a buffer, waiting in line behind those who asked before. Returns nullptr when the deadline passes, or once
    // `stop` is set and wake(stop) was called.
    std::byte* acquire(const std::atomic<bool>& stop, Clock::time_point deadline, const Tick& tick);

    void release(std::byte* buffer);

    // Ends the waits of all who passed this `stop`, which is already set.
    void wake(const std::atomic<bool>& stop);

    std::size_t chunk_bytes() const { return chunk_bytes_; }
    std::size_t count() const { return count_; }
    std::size_t free_count() const;
    std::uintptr_t address() const { return reinterpret_cast<std::uintptr_t>(first_); }

  private:
    struct Waiter;

    std::optional<MappedMemory> own_;
    std::byte* first_ = nullptr;
    std::size_t chunk_bytes_;
    std::size_t count_ = 0;
    mutable std::mutex mutex_;
    std::vector<std::byte*> free_;
    std::deque<Waiter*> line_;
};

}  // namespace lastgood

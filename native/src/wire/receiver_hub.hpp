// What a receiver's threads share: the windows, the queue of events, the counters.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <vector>

#include "storage/os_io.hpp"
#include "wire/windows.hpp"

namespace lastgood {

struct ReceiverOptions {
    unsigned threads = 1;
    std::vector<int> cpus;     // thread i stays on cpus[i % size]; empty: wherever the kernel likes
    std::size_t queue = 4096;  // events that wait for poll() at most
    double stall_s = 60.0;     // for the rest of a record that has begun
};

struct ReceiverEvent {
    enum class Kind : std::uint8_t { complete, end, closed };

    Kind kind = Kind::closed;
    std::uint64_t connection = 0;
    std::uint32_t rank = 0;
    std::uint32_t bucket = 0;     // complete
    std::uint64_t iteration = 0;  // complete, end
    Cause cause = Cause::count;   // closed; Cause::count: by the other side, between two records
    int error = 0;                // closed: the operating system's number, if that was the cause
    std::uint64_t life = 0;
};

struct ReceiverHub {
    ReceiverHub(std::uint64_t job, std::uint32_t epoch, const std::vector<DeclaredBucket>& buckets,
                const std::vector<std::vector<std::uintptr_t>>& slots, const ReceiverOptions& options)
        : job(job), options(options), windows(epoch, buckets, slots) {
        for (auto& number : refused) number.store(0);
    }

    void count(Cause cause) { refused[std::size_t(cause)].fetch_add(1, std::memory_order_relaxed); }

    // False where the queue is full; its worker is woken when it has room again.
    bool push(const ReceiverEvent& event) {
        {
            const std::lock_guard<std::mutex> lock(mutex);
            if (event.kind != ReceiverEvent::Kind::closed && event.life != life) return true;
            if (queue.size() >= options.queue) {
                blocked = true;
                return false;
            }
            queue.push_back(event);
        }
        progress.notify_all();
        return true;
    }

    const std::uint64_t job;
    const ReceiverOptions options;
    Windows windows;
    std::atomic<bool> stop{false};

    std::array<std::atomic<std::uint64_t>, std::size_t(Cause::count)> refused;
    std::atomic<std::uint64_t> records{0}, bytes{0}, read_bytes{0}, drained_bytes{0}, ends{0};
    std::atomic<std::uint64_t> connections{0}, parked{0};
    std::atomic<std::uint64_t> checksum_ns{0};

    std::mutex mutex;
    std::condition_variable progress;  // an event, a thread ended
    std::deque<ReceiverEvent> queue;
    std::uint64_t life = 0;  // events of older ones are forgotten
    bool blocked = false;    // a connection waits for room in the queue
};

}  // namespace lastgood

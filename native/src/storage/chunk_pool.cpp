#include "storage/chunk_pool.hpp"

#include <algorithm>
#include <condition_variable>
#include <stdexcept>

namespace lastgood {

struct ChunkPool::Waiter {
    const std::atomic<bool>* stop;
    std::byte* buffer = nullptr;
    std::condition_variable changed;
};

ChunkPool::ChunkPool(std::uintptr_t address, std::size_t nbytes, std::size_t chunk_bytes) : chunk_bytes_(chunk_bytes) {
    if (chunk_bytes == 0 || chunk_bytes % kAlignment != 0)
        throw std::invalid_argument("ChunkPool: chunk_bytes must be a positive multiple of 4096");
    if (nbytes < chunk_bytes) throw std::invalid_argument("ChunkPool: nbytes must hold at least one chunk");
    if (address == 0) {
        count_ = nbytes / chunk_bytes;
        own_.emplace(count_ * chunk_bytes);
        first_ = own_->data();
    } else {
        const std::uintptr_t aligned = align_up(address);
        if (aligned - address > nbytes || (count_ = (nbytes - (aligned - address)) / chunk_bytes) == 0)
            throw std::invalid_argument("ChunkPool: the memory given holds no aligned chunk");
        first_ = reinterpret_cast<std::byte*>(aligned);
    }
    free_.reserve(count_);
    for (std::size_t index = count_; index-- > 0;) free_.push_back(first_ + index * chunk_bytes);
}

std::byte* ChunkPool::acquire(const std::atomic<bool>& stop, Clock::time_point deadline, const Tick& tick) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (stop.load()) return nullptr;
    if (!free_.empty() && line_.empty()) {
        std::byte* buffer = free_.back();
        free_.pop_back();
        return buffer;
    }
    Waiter self;
    self.stop = &stop;
    line_.push_back(&self);
    // release() takes a waiter out of the line as it hands it a buffer.
    const auto leave = [&] { line_.erase(std::remove(line_.begin(), line_.end(), &self), line_.end()); };
    while (self.buffer == nullptr && !stop.load() && Clock::now() < deadline) {
        self.changed.wait_until(lock, std::min(deadline, Clock::now() + kTickPeriod));
        if (self.buffer == nullptr && tick) {
            lock.unlock();
            try {
                tick();
            } catch (...) {
                lock.lock();
                leave();
                std::byte* late = self.buffer;
                lock.unlock();
                if (late != nullptr) release(late);
                throw;
            }
            lock.lock();
        }
    }
    leave();
    return self.buffer;
}

void ChunkPool::release(std::byte* buffer) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (line_.empty()) {
        free_.push_back(buffer);
        return;
    }
    Waiter* next = line_.front();
    line_.pop_front();
    next->buffer = buffer;
    next->changed.notify_one();
}

void ChunkPool::wake(const std::atomic<bool>& stop) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (Waiter* waiter : line_)
        if (waiter->stop == &stop) waiter->changed.notify_one();
}

std::size_t ChunkPool::free_count() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return free_.size();
}

}  // namespace lastgood

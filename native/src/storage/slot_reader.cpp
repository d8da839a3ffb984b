#include "storage/slot_reader.hpp"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>

#include "storage/crc32c.hpp"

namespace lastgood {
namespace {

class Reading {
  public:
    Reading(const StreamPlace& place, const std::vector<std::uint32_t>& table, const std::vector<Range>& ranges,
            std::uint64_t first_chunk, Clock::time_point deadline)
        : place_(place), table_(table), ranges_(ranges), deadline_(deadline), next_(first_chunk) {
        if (place.chunk_bytes == 0 || place.chunk_bytes % kAlignment != 0 || place.data_offset % kAlignment != 0)
            throw std::invalid_argument("read_verify: chunk_bytes and data_offset must be multiples of 4096");
        const std::uint64_t chunks = (place.stream_bytes + place.chunk_bytes - 1) / place.chunk_bytes;
        if (table.size() != chunks)
            throw std::invalid_argument("read_verify: the table has " + std::to_string(table.size()) +
                                        " checksums for " + std::to_string(chunks) + " chunks");
        if (first_chunk > chunks) throw std::invalid_argument("read_verify: first_chunk is behind the stream");
        std::uint64_t at = std::min(first_chunk * place.chunk_bytes, place.stream_bytes);
        starts_.reserve(ranges.size() + 1);
        for (const Range& range : ranges) {
            starts_.push_back(at);
            if (range.nbytes > place.stream_bytes - at)
                throw std::invalid_argument("read_verify: the ranges are longer than the stream");
            at += range.nbytes;
        }
        starts_.push_back(at);
        end_chunk_ = (at + place.chunk_bytes - 1) / place.chunk_bytes;
        if (end_chunk_ < first_chunk) end_chunk_ = first_chunk;
    }

    std::uint64_t chunks() const { return end_chunk_ - next_.load(); }

    std::optional<BadChunk> run(unsigned threads, const Tick& tick) {
        std::vector<std::thread> workers;
        {
            const SignalsBlocked blocked;
            const std::uint64_t useful = std::min<std::uint64_t>(std::max(1u, threads), chunks());
            std::unique_lock<std::mutex> lock(mutex_);
            try {
                for (std::uint64_t number = 0; number < useful; ++number) {
                    workers.emplace_back([this] { work(); });
                    ++live_;
                }
            } catch (const std::system_error& reason) {
                if (workers.empty()) throw OsError(reason.code().value(), "start of a reader thread", 0, 0);
            }
        }
        std::exception_ptr interrupted;
        {
            std::unique_lock<std::mutex> lock(mutex_);
            while (live_ > 0) {
                ended_.wait_for(lock, kTickPeriod);
                if (live_ == 0 || interrupted || !tick) continue;
                lock.unlock();
                try {
                    tick();
                } catch (...) {
                    interrupted = std::current_exception();
                    stop_.store(true);
                }
                lock.lock();
            }
        }
        for (std::thread& worker : workers) worker.join();
        if (interrupted) std::rethrow_exception(interrupted);
        // A checksum that does not hold says more than a wait that ended or a later chunk that could not be read.
        if (bad_) return bad_;
        if (error_) throw *error_;
        if (late_) throw WaitEnded("reading and checking " + std::to_string(end_chunk_) + " chunks");
        return std::nullopt;
    }

  private:
    void work() {
        try {
            // A chunk's size is what the file says; what is read is no longer than the stream.
            const MappedMemory buffer(align_up(std::min(place_.chunk_bytes, place_.stream_bytes)));
            while (!stop_.load()) {
                const std::uint64_t index = next_.fetch_add(1);
                if (index >= end_chunk_) break;
                if (Clock::now() >= deadline_) {
                    std::lock_guard<std::mutex> lock(mutex_);
                    late_ = true;
                    stop_.store(true);
                    break;
                }
                one(index, buffer.data());
            }
        } catch (const OsError& reason) {
            std::lock_guard<std::mutex> lock(mutex_);
            if (!error_) error_.emplace(reason);
            stop_.store(true);
        }
        std::lock_guard<std::mutex> lock(mutex_);
        --live_;
        ended_.notify_all();
    }

    void one(std::uint64_t index, const std::byte* buffer) {
        const std::uint64_t begin = index * place_.chunk_bytes;
        const std::uint64_t end = std::min(begin + place_.chunk_bytes, place_.stream_bytes);
        const std::uint64_t padded = align_up(end - begin);
        read_fully(place_.fd, const_cast<std::byte*>(buffer), padded, place_.data_offset + begin);
        const std::uint32_t found = crc32c(buffer, padded, chunk_seed(place_.sequence, index));
        if (found != table_[index]) {
            std::lock_guard<std::mutex> lock(mutex_);
            // Chunks are handed out in order, so all before this one are being looked at as well.
            if (!bad_ || index < bad_->index) bad_ = BadChunk{index, table_[index], found};
            stop_.store(true);
            return;
        }
        std::size_t range = std::upper_bound(starts_.begin(), starts_.end(), begin) - starts_.begin() - 1;
        for (std::uint64_t at = begin; at < end && range < ranges_.size(); ++range) {
            const std::uint64_t inside = at - starts_[range];
            const std::uint64_t step = std::min(ranges_[range].nbytes - inside, end - at);
            if (ranges_[range].address != 0)
                std::memcpy(reinterpret_cast<void*>(ranges_[range].address + inside), buffer + (at - begin), step);
            at += step;
        }
    }

    const StreamPlace& place_;
    const std::vector<std::uint32_t>& table_;
    const std::vector<Range>& ranges_;
    const Clock::time_point deadline_;
    std::vector<std::uint64_t> starts_;
    std::uint64_t end_chunk_ = 0;
    std::atomic<std::uint64_t> next_;
    std::atomic<bool> stop_{false};
    std::mutex mutex_;
    std::condition_variable ended_;
    std::size_t live_ = 0;
    bool late_ = false;
    std::optional<BadChunk> bad_;
    std::optional<OsError> error_;
};

}  // namespace

std::optional<BadChunk> read_verify(const StreamPlace& place, const std::vector<std::uint32_t>& table,
                                    const std::vector<Range>& ranges, std::uint64_t first_chunk, unsigned threads,
                                    Clock::time_point deadline, const Tick& tick) {
    Reading reading(place, table, ranges, first_chunk, deadline);
    if (reading.chunks() == 0) return std::nullopt;
    return reading.run(threads, tick);
}

}  // namespace lastgood

#include "storage/slot_writer.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>

#include "storage/crc32c.hpp"

namespace lastgood {
namespace {

constexpr std::uint64_t kParallelCopyBytes = 8 << 20;  // below, starting a thread costs more than it saves
constexpr double kDestructorWaitS = 5.0;

// A run of the stream inside one chunk.
struct Piece {
    std::uint64_t begin;
    std::uint64_t end;
};

}  // namespace

// Everything that threads touch. They share its ownership, so that none can outlive what it uses.
struct SlotWriter::State {
    State(std::shared_ptr<ChunkPool> pool, int fd, std::uint64_t data_offset, std::uint64_t stream_bytes,
          std::uint64_t chunk_bytes, std::uint64_t sequence, const WriteOptions& options)
        : pool(std::move(pool)),
          descriptor(fd),
          mapping(options.mapping),
          sums(crc32c_variant(options.checksum)),
          data_offset(data_offset),
          stream_bytes(stream_bytes),
          chunk_bytes(chunk_bytes),
          sequence(sequence),
          buffered(!options.mapping && is_buffered(fd)),
          chunks((stream_bytes + chunk_bytes - 1) / chunk_bytes),
          table(chunks) {}

    // The chunk that copy_host() has begun and not yet filled, with the checksum of what is in it.
    struct Partial {
        std::byte* buffer;
        std::uint32_t checksum;
    };

    struct Job {
        std::uint64_t index;
        std::byte* buffer;
        std::optional<std::uint32_t> checksum;  // absent where the caller filled the buffer
    };

    const std::shared_ptr<ChunkPool> pool;
    const OwnDescriptor descriptor;
    const std::shared_ptr<PersistentMapping> mapping;
    const Crc32cVariant& sums;
    const std::uint64_t data_offset;
    const std::uint64_t stream_bytes;
    const std::uint64_t chunk_bytes;
    const std::uint64_t sequence;
    const bool buffered;
    const std::uint64_t chunks;

    std::atomic<bool> stop{false};
    mutable std::mutex mutex;
    std::condition_variable work;      // for writers: a job, closing or stop
    std::condition_variable progress;  // for callers: a chunk written, a thread ended, stop
    std::deque<Job> queue;
    std::vector<std::uint32_t> table;
    std::uint64_t written = 0;
    std::uint64_t position = 0;
    std::optional<Partial> partial;
    std::map<std::uint64_t, std::byte*> lent;
    bool busy = false;  // a caller is appending
    bool closing = false;
    std::optional<OsError> error;
    std::size_t live = 0;
    std::vector<std::thread> threads;

    std::uint64_t chunk_length(std::uint64_t index) const {
        return std::min(chunk_bytes, stream_bytes - index * chunk_bytes);
    }

    void fail(const OsError& reason) {
        {
            std::lock_guard<std::mutex> lock(mutex);
            if (!error) error = reason;
            stop.store(true);
        }
        work.notify_all();
        progress.notify_all();
        pool->wake(stop);
    }

    [[noreturn]] void throw_failure() {
        std::lock_guard<std::mutex> lock(mutex);
        throw error ? *error : cancelled("write");
    }

    void submit(Job job) {
        {
            std::lock_guard<std::mutex> lock(mutex);
            if (!stop.load()) {
                queue.push_back(job);
                job.buffer = nullptr;
            }
        }
        if (job.buffer != nullptr)
            pool->release(job.buffer);
        else
            work.notify_one();
    }

    void write_jobs() {
        for (;;) {
            Job job;
            {
                std::unique_lock<std::mutex> lock(mutex);
                work.wait(lock, [&] { return stop.load() || closing || !queue.empty(); });
                if (queue.empty()) break;
                job = queue.front();
                queue.pop_front();
            }
            if (!stop.load()) write_one(job);
            pool->release(job.buffer);
        }
        std::lock_guard<std::mutex> lock(mutex);
        --live;
        progress.notify_all();
    }

    void write_one(Job& job) {
        const std::uint64_t length = chunk_length(job.index);
        const std::uint64_t padded = align_up(length);
        if (!job.checksum) {
            std::memset(job.buffer + length, 0, padded - length);
            job.checksum = sums.sum(job.buffer, padded, chunk_seed(sequence, job.index));
        }
        const std::uint64_t offset = data_offset + job.index * chunk_bytes;
        try {
            const bool whole = mapping ? mapping->write(job.buffer, padded, offset, stop)
                                       : write_fully(descriptor.get(), job.buffer, padded, offset, stop);
            if (!whole) return;
        } catch (const OsError& reason) {
            fail(reason);
            return;
        }
        // So that the disk works while later chunks are copied, and not only from the flush on.
        if (buffered) start_writeback(descriptor.get(), offset, padded);
        std::lock_guard<std::mutex> lock(mutex);
        table[job.index] = *job.checksum;
        if (++written == chunks) progress.notify_all();
    }

    // After the end of the stream or a failure, the chunk that was begun is of no more use.
    void release_partial() {
        std::optional<Partial> begun;
        {
            std::lock_guard<std::mutex> lock(mutex);
            if (!busy) begun.swap(partial);
        }
        if (begun) pool->release(begun->buffer);
    }

    // Buffers that the caller fills may be the target of a device's copy: only the caller knows when that has ended.
    void release_lent() {
        std::map<std::uint64_t, std::byte*> back;
        {
            std::lock_guard<std::mutex> lock(mutex);
            back.swap(lent);
        }
        for (const auto& entry : back) pool->release(entry.second);
    }

    bool wait_ended(Clock::time_point deadline) {
        std::unique_lock<std::mutex> lock(mutex);
        return progress.wait_until(lock, deadline, [&] { return live == 0; });
    }
};

namespace {

// One caller appends at a time.
template <class State>
class Appending {
  public:
    explicit Appending(State& state) : state_(state) {
        std::lock_guard<std::mutex> lock(state.mutex);
        if (state.busy) throw std::logic_error("SlotWriter: two threads append to one stream");
        state.busy = true;
    }
    ~Appending() {
        std::lock_guard<std::mutex> lock(state_.mutex);
        state_.busy = false;
    }

  private:
    State& state_;
};

// Gathers a stretch of the concatenated ranges into chunk buffers; several threads may run work() at once.
template <class State>
class Gather {
  public:
    Gather(State& state, const std::vector<Range>& ranges, Clock::time_point deadline)
        : state_(state), ranges_(ranges), deadline_(deadline), begin_(state.position) {
        starts_.reserve(ranges.size() + 1);
        std::uint64_t at = begin_;
        for (const Range& range : ranges) {
            starts_.push_back(at);
            if (range.nbytes > state.stream_bytes - at)
                throw std::invalid_argument("SlotWriter: the ranges are longer than the rest of the stream (" +
                                            std::to_string(state.stream_bytes - begin_) + " bytes)");
            at += range.nbytes;
        }
        starts_.push_back(at);
        end_ = at;
        for (std::uint64_t from = begin_; from < end_;) {
            const std::uint64_t to = std::min(end_, (from / state.chunk_bytes + 1) * state.chunk_bytes);
            pieces_.push_back({from, to});
            from = to;
        }
    }

    std::uint64_t end() const { return end_; }
    std::size_t pieces() const { return pieces_.size(); }
    bool timed_out() const { return timed_out_.load(); }

    void work(const Tick& tick) {
        for (;;) {
            const std::size_t number = next_.fetch_add(1);
            if (number >= pieces_.size() || state_.stop.load() || timed_out_.load()) return;
            if (!one(pieces_[number], tick)) return;
        }
    }

  private:
    bool one(const Piece& piece, const Tick& tick) {
        const std::uint64_t index = piece.begin / state_.chunk_bytes;
        const std::uint64_t chunk_begin = index * state_.chunk_bytes;
        const std::uint64_t chunk_end = chunk_begin + state_.chunk_length(index);
        std::byte* buffer;
        std::uint32_t checksum;
        if (piece.begin != chunk_begin) {
            // Only the first piece can go on with a chunk, and only its worker looks at `partial` before the last
            // piece's worker, which is the same one if there is but one piece.
            std::lock_guard<std::mutex> lock(state_.mutex);
            buffer = state_.partial->buffer;
            checksum = state_.partial->checksum;
            state_.partial.reset();
        } else {
            buffer = state_.pool->acquire(state_.stop, deadline_, tick);
            if (buffer == nullptr) {
                if (!state_.stop.load()) timed_out_.store(true);
                return false;
            }
            checksum = chunk_seed(state_.sequence, index);
        }
        std::byte* to = buffer + (piece.begin - chunk_begin);
        std::size_t range = std::upper_bound(starts_.begin(), starts_.end(), piece.begin) - starts_.begin() - 1;
        for (std::uint64_t at = piece.begin; at < piece.end; ++range) {
            const std::uint64_t inside = at - starts_[range];
            const std::uint64_t step = std::min(ranges_[range].nbytes - inside, piece.end - at);
            if (step == 0) continue;
            checksum =
                state_.sums.copy(to, reinterpret_cast<const void*>(ranges_[range].address + inside), step, checksum);
            to += step;
            at += step;
        }
        if (piece.end == chunk_end) {
            const std::uint64_t padding = align_up(chunk_end) - chunk_end;
            std::memset(to, 0, padding);
            state_.submit({index, buffer, state_.sums.sum(to, padding, checksum)});
        } else {
            std::lock_guard<std::mutex> lock(state_.mutex);
            open_ = {buffer, checksum};
        }
        return true;
    }

  public:
    // The chunk that the last piece left open, to be gone on with by the next append.
    std::optional<typename State::Partial> open_;

  private:
    State& state_;
    const std::vector<Range>& ranges_;
    const Clock::time_point deadline_;
    const std::uint64_t begin_;
    std::uint64_t end_ = 0;
    std::vector<std::uint64_t> starts_;
    std::vector<Piece> pieces_;
    std::atomic<std::size_t> next_{0};
    std::atomic<bool> timed_out_{false};
};

}  // namespace

SlotWriter::SlotWriter(std::shared_ptr<ChunkPool> pool, int fd, std::uint64_t data_offset, std::uint64_t stream_bytes,
                       std::uint64_t chunk_bytes, std::uint64_t sequence, const WriteOptions& options)
    : owner_(getpid()) {
    if (chunk_bytes == 0 || chunk_bytes % kAlignment != 0 || data_offset % kAlignment != 0)
        throw std::invalid_argument(
            "SlotWriter: chunk_bytes and data_offset must be multiples of 4096, chunk_bytes not 0");
    if (chunk_bytes > pool->chunk_bytes())
        throw std::invalid_argument("SlotWriter: chunk_bytes is " + std::to_string(chunk_bytes) +
                                    ", but the pool's buffers hold " + std::to_string(pool->chunk_bytes()));
    if (options.writer_threads == 0) throw std::invalid_argument("SlotWriter: writer_threads must be at least 1");
    if (options.mapping && options.mapping->nbytes() < data_offset + align_up(stream_bytes))
        throw std::invalid_argument("SlotWriter: the mapping is shorter than the stream");
    state_ = std::make_shared<State>(std::move(pool), fd, data_offset, stream_bytes, chunk_bytes, sequence, options);
    const std::uint64_t useful =
        std::max<std::uint64_t>(1, std::min<std::uint64_t>(options.writer_threads, state_->chunks));
    const SignalsBlocked blocked;
    const auto give_up = [this] {
        abort();
        for (std::thread& thread : state_->threads) thread.join();
        state_->threads.clear();
    };
    try {
        for (std::uint64_t number = 0; number < useful; ++number) {
            {
                std::lock_guard<std::mutex> lock(state_->mutex);
                ++state_->live;
            }
            state_->threads.emplace_back([state = state_] { state->write_jobs(); });
            if (!options.cpus.empty())
                pin_thread(state_->threads.back(), options.cpus[number % options.cpus.size()], "a writer thread");
        }
    } catch (const std::system_error& reason) {
        {
            std::lock_guard<std::mutex> lock(state_->mutex);
            --state_->live;
        }
        give_up();
        throw OsError(reason.code().value(), "start of a writer thread", 0, 0);
    } catch (const OsError&) {
        give_up();
        throw;
    }
}

SlotWriter::~SlotWriter() { shut_down(); }

void SlotWriter::shut_down() {
    if (!state_) return;
    if (forked()) {
        // A fork copied the object but not its threads: locks may be held by nobody, so all of it is left alone.
        for (std::thread& thread : state_->threads) thread.detach();
        new std::shared_ptr<State>(std::move(state_));
        return;
    }
    abort();
    if (!join(deadline_after(kDestructorWaitS)))
        for (std::thread& thread : state_->threads) thread.detach();
    state_->release_lent();
    state_->release_partial();
    state_.reset();
}

void SlotWriter::copy_host(const std::vector<Range>& ranges, Clock::time_point deadline, unsigned threads,
                           const Tick& tick) {
    State& state = *state_;
    const Appending<State> appending(state);
    if (state.stop.load()) state.throw_failure();
    Gather<State> gather(state, ranges, deadline);
    const std::uint64_t nbytes = gather.end() - state.position;
    std::vector<std::thread> helpers;
    if (threads > 1 && nbytes >= kParallelCopyBytes) {
        const SignalsBlocked blocked;
        const std::size_t wanted = std::min<std::size_t>(threads, gather.pieces()) - 1;
        try {
            for (std::size_t number = 0; number < wanted; ++number)
                helpers.emplace_back([&gather] { gather.work(Tick()); });
        } catch (const std::system_error&) {
            // Fewer helpers copy as well, only slower.
        }
    }
    try {
        gather.work(tick);
    } catch (...) {
        abort();
        for (std::thread& helper : helpers) helper.join();
        if (gather.open_) state.pool->release(gather.open_->buffer);
        throw;
    }
    for (std::thread& helper : helpers) helper.join();
    {
        std::lock_guard<std::mutex> lock(state.mutex);
        // After a failure this keeps the buffer where release() finds it; an older one may still be there then.
        if (gather.open_ && !state.partial) std::swap(gather.open_, state.partial);
    }
    if (gather.open_) state.pool->release(gather.open_->buffer);
    if (state.stop.load()) state.throw_failure();
    if (gather.timed_out()) {
        // Some chunks are copied and some not: the stream cannot go on.
        abort();
        throw WaitEnded("a free buffer of the chunk pool (" + std::to_string(state.pool->count()) + " of " +
                        std::to_string(state.pool->chunk_bytes()) + " bytes)");
    }
    std::lock_guard<std::mutex> lock(state.mutex);
    state.position = gather.end();
}

AcquiredChunk SlotWriter::acquire(Clock::time_point deadline, const Tick& tick) {
    State& state = *state_;
    const Appending<State> appending(state);
    if (state.stop.load()) state.throw_failure();
    if (state.partial) throw std::invalid_argument("SlotWriter: acquire() in the middle of a chunk of copy_host()");
    if (state.position >= state.stream_bytes)
        throw std::invalid_argument("SlotWriter: acquire() after the end of the stream");
    std::byte* buffer = state.pool->acquire(state.stop, deadline, tick);
    if (buffer == nullptr) {
        if (state.stop.load()) state.throw_failure();
        throw WaitEnded("a free buffer of the chunk pool (" + std::to_string(state.pool->count()) + " of " +
                        std::to_string(state.pool->chunk_bytes()) + " bytes)");
    }
    std::lock_guard<std::mutex> lock(state.mutex);
    const std::uint64_t index = state.position / state.chunk_bytes;
    const std::uint64_t length = state.chunk_length(index);
    state.lent[index] = buffer;
    state.position += length;
    return {reinterpret_cast<std::uintptr_t>(buffer), index, length};
}

void SlotWriter::put(std::uint64_t index) {
    State& state = *state_;
    std::byte* buffer;
    {
        std::lock_guard<std::mutex> lock(state.mutex);
        const auto found = state.lent.find(index);
        if (found == state.lent.end())
            throw std::invalid_argument("SlotWriter: put() of chunk " + std::to_string(index) + ", which is not lent");
        buffer = found->second;
        state.lent.erase(found);
    }
    state.submit({index, buffer, std::nullopt});
    if (state.stop.load()) state.throw_failure();
}

std::vector<std::uint32_t> SlotWriter::finish(Clock::time_point deadline, const Tick& tick) {
    State& state = *state_;
    {
        std::unique_lock<std::mutex> lock(state.mutex);
        if (!state.stop.load() && (state.position < state.stream_bytes || !state.lent.empty()))
            throw std::invalid_argument("SlotWriter: finish() with " + std::to_string(state.position) + " of " +
                                        std::to_string(state.stream_bytes) + " bytes given and " +
                                        std::to_string(state.lent.size()) + " chunks still lent");
        while (!state.stop.load() && state.written < state.chunks) {
            if (Clock::now() >= deadline)
                throw WaitEnded("writing " + std::to_string(state.chunks - state.written) + " of " +
                                std::to_string(state.chunks) + " chunks");
            state.progress.wait_until(lock, std::min(deadline, Clock::now() + kTickPeriod));
            if (tick) {
                lock.unlock();
                tick();
                lock.lock();
            }
        }
        if (!state.stop.load()) state.closing = true;
    }
    if (state.stop.load()) state.throw_failure();
    state.work.notify_all();
    join(deadline_after(kDestructorWaitS));
    return state.table;
}

void SlotWriter::abort() { state_->fail(cancelled("write")); }

bool SlotWriter::join(Clock::time_point deadline) {
    if (!state_->wait_ended(deadline)) return false;
    // The threads have nothing left to do but return.
    std::vector<std::thread> ended;
    {
        std::lock_guard<std::mutex> lock(state_->mutex);
        ended.swap(state_->threads);
    }
    for (std::thread& thread : ended) thread.join();
    state_->release_partial();
    return true;
}

void SlotWriter::release() { state_->release_lent(); }

std::uint64_t SlotWriter::position() const {
    std::lock_guard<std::mutex> lock(state_->mutex);
    return state_->position;
}

std::uint64_t SlotWriter::stream_bytes() const { return state_->stream_bytes; }

}  // namespace lastgood

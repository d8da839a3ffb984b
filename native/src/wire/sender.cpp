#include "wire/sender.hpp"

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

#include "storage/crc32c.hpp"
#include "wire/descriptor.hpp"

namespace lastgood {
namespace {

constexpr std::size_t kBatchRecords = 256;  // of one system call; the kernel takes 1024 parts, and a record has up to 3
constexpr std::uint64_t kBatchBytes = 1 << 20;  // still in the cache, after its checksum, when the kernel copies it
constexpr double kDestructorWaitS = 5.0;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

}  // namespace

// Everything that the thread touches. It shares the ownership.
struct Sender::State {
    State(int fd, std::uint64_t job, std::uint32_t epoch, std::uint32_t rank, const SenderOptions& options)
        : descriptor(duplicate(fd), "Sender: a connection's descriptor"),
          job(job),
          epoch(epoch),
          rank(rank),
          options(options),
          pool(align_up(options.pool_bytes)) {}

    struct Entry {
        Record record;
        std::uint64_t ticket;
        std::uint64_t nbytes;
        const std::byte* borrowed;  // nullptr: in the pool, from `place` on
        std::uint64_t place = 0;
        bool ready = false;  // a copy into the pool has ended
    };

    // One record of a batch, with up to two ranges of memory (the pool's end and its begin).
    struct Piece {
        Header header;
        Record record;
        iovec parts[2];
        std::size_t count;
    };

    const Descriptor descriptor;
    Bell bell;
    const std::uint64_t job;
    const std::uint32_t epoch;
    const std::uint32_t rank;
    const SenderOptions options;
    const MappedMemory pool;
    std::thread thread;

    std::atomic<bool> stop{false};
    mutable std::mutex mutex;
    std::condition_variable progress;  // an entry has gone out, a failure, the thread's end
    std::deque<Entry> queue;
    std::uint64_t pool_written = 0;  // positions in an endless stream that lies round the pool
    std::uint64_t pool_freed = 0;
    std::uint64_t last_ticket = 0;
    std::uint64_t returned = 0;
    std::uint64_t queued_bytes = 0;
    bool asleep = false;
    bool closing = false;
    bool ended = false;
    int error = 0;
    SenderCounters counters;

    // Only the thread's own.
    std::vector<Piece> batch;
    std::vector<iovec> parts;
    std::uint64_t cut = 0;  // bytes of the first entry that have gone out

    void wake() {
        if (!asleep) return;
        asleep = false;
        bell.ring();
    }

    [[noreturn]] void throw_failure() const {
        throw_system(error != 0 ? error : ECANCELED, "sending to " + options.destination);
    }

    // -- the thread --------------------------------------------------------------------------------------------------

    void run() {
        int number = 0;
        batch.reserve(kBatchRecords);
        parts.reserve(3 * kBatchRecords);
        while (number == 0 && !stop.load()) {
            if (gather()) {
                sum();
                number = send_batch();
                if (number == 0 && !stop.load()) retire();
            } else {
                {
                    const std::lock_guard<std::mutex> lock(mutex);
                    if (closing && queue.empty()) break;
                }
                number = wait_for(0, nullptr);
            }
        }
        (void)shutdown(descriptor.get(), number == 0 && !stop.load() ? SHUT_WR : SHUT_RDWR);
        const std::lock_guard<std::mutex> lock(mutex);
        error = number != 0 ? number : stop.load() ? ECANCELED : 0;
        ended = true;
        progress.notify_all();
    }

    // The next records that are ready. False where there are none, and then put() wakes the thread.
    bool gather() {
        batch.clear();
        const std::lock_guard<std::mutex> lock(mutex);
        std::uint64_t bytes = 0;
        std::uint64_t at = cut;
        for (const Entry& entry : queue) {
            if (!entry.ready) break;
            do {
                if (batch.size() == kBatchRecords || (bytes >= kBatchBytes && !batch.empty())) return true;
                const std::uint64_t length = std::min(entry.nbytes - at, options.record_bytes);
                batch.push_back(piece(entry, at, length));
                at += length;
                bytes += length;
            } while (at < entry.nbytes);
            at = 0;
        }
        asleep = batch.empty();
        return !batch.empty();
    }

    Piece piece(const Entry& entry, std::uint64_t at, std::uint64_t length) const {
        Piece made;
        made.record = entry.record;
        made.record.offset += at;
        made.record.length = std::uint32_t(length);
        made.count = 0;
        const auto add = [&made](const std::byte* from, std::uint64_t nbytes) {
            if (nbytes != 0) made.parts[made.count++] = {const_cast<std::byte*>(from), std::size_t(nbytes)};
        };
        if (entry.borrowed != nullptr) {
            add(entry.borrowed + at, length);
        } else if (length != 0) {
            const std::uint64_t begin = (entry.place + at) % options.pool_bytes;
            const std::uint64_t to_end = std::min(length, options.pool_bytes - begin);
            add(pool.data() + begin, to_end);
            add(pool.data(), length - to_end);
        }
        return made;
    }

    void sum() {
        const auto begin = Clock::now();
        parts.clear();
        for (Piece& made : batch) {
            std::uint32_t checksum = 0;
            for (std::size_t number = 0; number < made.count; ++number)
                checksum = crc32c(made.parts[number].iov_base, made.parts[number].iov_len, checksum);
            made.record.checksum = checksum;
            pack_header(made.record, made.header);
            parts.push_back({made.header.data(), kHeaderBytes});
            parts.insert(parts.end(), made.parts, made.parts + made.count);
        }
        const std::lock_guard<std::mutex> lock(mutex);
        counters.checksum_s += seconds_since(begin);
    }

    // Returns the operating system's number, 0 where all has gone out, or where this is given up.
    int send_batch() {
        std::size_t first = 0;
        Clock::time_point progressed = Clock::now();
        std::uint64_t sends = 0;
        double blocked_s = 0.0;
        int number = 0;
        while (first < parts.size() && !stop.load() && number == 0) {
            msghdr message{};
            message.msg_iov = parts.data() + first;
            message.msg_iovlen = parts.size() - first;
            const ssize_t sent = sendmsg(descriptor.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
            if (sent < 0) {
                if (errno == EINTR) continue;
                number = errno == EAGAIN || errno == EWOULDBLOCK ? 0 : errno;
                const auto begin = Clock::now();
                if (number == 0) number = wait_for(POLLOUT, &progressed);
                blocked_s += seconds_since(begin);
                continue;
            }
            ++sends;
            progressed = Clock::now();
            auto rest = std::size_t(sent);
            while (first < parts.size() && rest >= parts[first].iov_len) rest -= parts[first++].iov_len;
            if (first < parts.size()) {
                parts[first].iov_base = static_cast<char*>(parts[first].iov_base) + rest;
                parts[first].iov_len -= rest;
            }
        }
        const std::lock_guard<std::mutex> lock(mutex);
        counters.sends += sends;
        counters.blocked_s += blocked_s;
        return number;
    }

    // Waits until the bell rings, the other side closes, or (with POLLOUT) it takes more, until `stall_s` after
    // `progressed`. Returns the operating system's number of a failure.
    int wait_for(short event, const Clock::time_point* progressed) {
        pollfd watched[2] = {{bell.get(), POLLIN, 0}, {descriptor.get(), short(event | POLLRDHUP), 0}};
        int wait_ms = -1;
        if (progressed != nullptr) {
            const double left_s = options.stall_s - seconds_since(*progressed);
            if (left_s <= 0) return ETIMEDOUT;
            wait_ms = int(std::min(left_s, 1000.0) * 1e3) + 1;
        }
        if (::poll(watched, 2, wait_ms) < 0) return errno == EINTR ? 0 : errno;
        if (watched[0].revents != 0) bell.answer();
        if ((watched[1].revents & (POLLERR | POLLHUP | POLLRDHUP | POLLNVAL)) == 0) return 0;
        int number = 0;
        socklen_t length = sizeof(number);
        (void)getsockopt(descriptor.get(), SOL_SOCKET, SO_ERROR, &number, &length);
        return number != 0 ? number : EPIPE;
    }

    // What the batch held has gone out.
    void retire() {
        {
            const std::lock_guard<std::mutex> lock(mutex);
            for (const Piece& made : batch) {
                Entry& entry = queue.front();
                cut += made.record.length;
                ++counters.records;
                counters.bytes += made.record.length;
                queued_bytes -= made.record.length;
                if (cut < entry.nbytes) continue;
                cut = 0;
                if (entry.borrowed == nullptr) pool_freed += entry.nbytes;
                returned = entry.ticket;
                queue.pop_front();
            }
        }
        progress.notify_all();
    }

    // -- callers -----------------------------------------------------------------------------------------------------

    bool room(std::uint64_t copied) const {
        return queue.size() < options.queue && copied <= options.pool_bytes - (pool_written - pool_freed);
    }

    // Waits until `done`, the thread's end or the deadline. The lock is held before and behind it.
    template <class Done>
    void wait(std::unique_lock<std::mutex>& lock, Clock::time_point deadline, const Tick& tick, Done&& done) {
        while (!ended && !done() && Clock::now() < deadline) {
            progress.wait_until(lock, std::min(deadline, Clock::now() + kTickPeriod));
            if (!tick) continue;
            lock.unlock();
            tick();
            lock.lock();
        }
    }
};

Sender::Sender(int fd, std::uint64_t job, std::uint32_t epoch, std::uint32_t rank, const SenderOptions& options)
    : owner_(getpid()) {
    if (options.queue == 0 || options.pool_bytes == 0)
        throw std::invalid_argument("Sender: queue and pool_bytes must be at least 1");
    if (options.record_bytes == 0 || options.record_bytes > kMaxPayloadBytes || options.record_bytes % 8 != 0)
        throw std::invalid_argument("Sender: record_bytes must be a multiple of 8, up to " +
                                    std::to_string(kMaxPayloadBytes));
    if (!(options.stall_s > 0)) throw std::invalid_argument("Sender: stall_s must be more than 0");
    state_ = std::make_shared<State>(fd, job, epoch, rank, options);
    const SignalsBlocked blocked;
    try {
        state_->thread = std::thread([state = state_] { state->run(); });
    } catch (...) {
        state_->ended = true;
        throw;
    }
    try {
        if (options.cpu >= 0) pin_thread(state_->thread, options.cpu, "a sender thread");
    } catch (...) {
        shut_down();
        throw;
    }
}

Sender::~Sender() { shut_down(); }

void Sender::shut_down() {
    if (!state_) return;
    if (forked()) {
        // A fork copied the object but not its thread: locks may be held by nobody, so all of it is left alone.
        state_->thread.detach();
        new std::shared_ptr<State>(std::move(state_));
        return;
    }
    abort();
    if (!join(deadline_after(kDestructorWaitS))) state_->thread.detach();
    state_.reset();
}

std::uint64_t Sender::put(const Record& record, const void* data, std::uint64_t nbytes, bool borrowed,
                          Clock::time_point deadline, const Tick& tick) {
    State& state = *state_;
    const std::uint64_t item = item_bytes(record.dtype);
    if (item == 0 || record.offset % item != 0 || nbytes % item != 0 || (record.kind == RecordKind::end && nbytes != 0))
        throw std::invalid_argument("Sender: " + std::to_string(nbytes) + " bytes at offset " +
                                    std::to_string(record.offset) + " of dtype " + std::to_string(record.dtype) +
                                    " make no record");
    if (data == nullptr && nbytes != 0) throw std::invalid_argument("Sender: a payload at address 0");
    const std::uint64_t copied = borrowed ? 0 : nbytes;
    if (copied > state.options.pool_bytes)
        throw std::invalid_argument("Sender: " + std::to_string(nbytes) + " bytes never fit the pool of " +
                                    std::to_string(state.options.pool_bytes) + "; lend them, or make it larger");
    std::unique_lock<std::mutex> lock(state.mutex);
    state.wait(lock, deadline, tick, [&] { return state.closing || state.room(copied); });
    if (state.error != 0) state.throw_failure();
    if (state.closing) throw std::logic_error("Sender: put() after close()");
    if (!state.room(copied)) return 0;
    const std::uint64_t ticket = ++state.last_ticket;
    state.queue.push_back({record, ticket, nbytes, borrowed ? static_cast<const std::byte*>(data) : nullptr,
                           state.pool_written, copied == 0});
    State::Entry& entry = state.queue.back();
    entry.record.job = state.job;
    entry.record.epoch = state.epoch;
    entry.record.rank = state.rank;
    state.pool_written += copied;
    state.queued_bytes += nbytes;
    if (copied != 0) {
        // Its place is its own, and an entry that is not ready stays in the queue.
        lock.unlock();
        const std::uint64_t begin = entry.place % state.options.pool_bytes;
        const std::uint64_t to_end = std::min(nbytes, state.options.pool_bytes - begin);
        std::memcpy(state.pool.data() + begin, data, to_end);
        std::memcpy(state.pool.data(), static_cast<const std::byte*>(data) + to_end, nbytes - to_end);
        lock.lock();
        entry.ready = true;
    }
    state.wake();
    return ticket;
}

bool Sender::returned(std::uint64_t ticket) const {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    return ticket <= state_->returned || state_->ended;
}

bool Sender::wait_returned(std::uint64_t ticket, Clock::time_point deadline, const Tick& tick) {
    State& state = *state_;
    std::unique_lock<std::mutex> lock(state.mutex);
    state.wait(lock, deadline, tick, [&] { return ticket <= state.returned; });
    if (ticket <= state.returned) return true;
    if (state.error != 0) state.throw_failure();
    return state.ended;
}

std::uint64_t Sender::last_ticket() const {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    return state_->last_ticket;
}

int Sender::error() const {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    return state_->error;
}

SenderCounters Sender::counters() const {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    SenderCounters found = state_->counters;
    found.queued = state_->queue.size();
    found.queued_bytes = state_->queued_bytes;
    return found;
}

bool Sender::close(Clock::time_point deadline, const Tick& tick) {
    State& state = *state_;
    bool whole;
    {
        std::unique_lock<std::mutex> lock(state.mutex);
        state.closing = true;
        state.wake();
        state.wait(lock, deadline, tick, [] { return false; });
        whole = state.ended && state.error == 0;
    }
    if (!whole) abort();
    return join(deadline_after(kDestructorWaitS)) && whole;
}

void Sender::abort() {
    state_->stop.store(true);
    state_->bell.ring();
}

bool Sender::join(Clock::time_point deadline) {
    State& state = *state_;
    std::thread ended;
    {
        std::unique_lock<std::mutex> lock(state.mutex);
        if (!state.progress.wait_until(lock, deadline, [&state] { return state.ended; })) return false;
        ended.swap(state.thread);
    }
    if (ended.joinable()) ended.join();
    return true;
}

bool Sender::forked() const { return getpid() != owner_; }

}  // namespace lastgood

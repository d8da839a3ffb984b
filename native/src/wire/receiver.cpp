#include "wire/receiver.hpp"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>

#include "storage/crc32c.hpp"
#include "wire/descriptor.hpp"

namespace lastgood {
namespace {

constexpr std::uint64_t kPieceBytes = 256 << 10;  // of one read: still in the cache when its checksum is taken
constexpr std::uint64_t kTurnBytes = 4 << 20;     // of one connection, before the next one of its thread has its turn
constexpr std::size_t kMostReady = 64;
constexpr double kDestructorWaitS = 5.0;

struct Connection {
    enum class Mode { header, receiving, draining };

    Connection(int fd, std::uint64_t number, std::uint32_t rank, std::uint64_t life)
        : descriptor(fcntl(fd, F_DUPFD_CLOEXEC, 0), "Receiver: a connection's descriptor"),
          number(number),
          rank(rank),
          life(life) {}

    const Descriptor descriptor;
    const std::uint64_t number;
    const std::uint32_t rank;
    const std::uint64_t life;
    Mode mode = Mode::header;
    Header header{};
    std::size_t header_bytes = 0;  // that have arrived
    Record record;
    Reservation reservation;
    std::uint64_t done = 0;  // bytes of the payload that have arrived
    std::uint32_t checksum = 0;
    std::array<ReceiverEvent, 2> events;  // that the queue had no room for: one of a record, one of the end
    std::size_t waiting_events = 0;
    bool parked = false;
    bool ended = false;
    Clock::time_point progress = Clock::now();
};

}  // namespace

// Everything that threads touch. They share its ownership, so that none can outlive what it uses.
struct Receiver::State {
    State(std::uint64_t job, std::uint32_t epoch, const std::vector<DeclaredBucket>& buckets,
          const std::vector<std::vector<std::uintptr_t>>& slots, const ReceiverOptions& options)
        : job(job), options(options), windows(epoch, buckets, slots) {
        for (auto& count : refused) count.store(0);
    }

    const std::uint64_t job;
    const ReceiverOptions options;
    Windows windows;
    std::atomic<bool> stop{false};

    std::array<std::atomic<std::uint64_t>, std::size_t(Cause::count)> refused;
    std::atomic<std::uint64_t> records{0}, bytes{0}, drained_bytes{0}, ends{0}, connections{0}, parked{0};
    std::atomic<std::uint64_t> checksum_ns{0};

    std::mutex mutex;
    std::condition_variable progress;  // an event, a thread ended
    std::deque<ReceiverEvent> queue;
    std::uint64_t life = 0;  // events of older ones are forgotten
    bool blocked = false;    // a connection waits for room in the queue
    std::uint64_t next_connection = 1;
    std::size_t next_worker = 0;
    std::size_t live = 0;
    std::vector<std::unique_ptr<Worker>> workers;
    std::vector<std::thread> threads;

    void count(Cause cause) { refused[std::size_t(cause)].fetch_add(1, std::memory_order_relaxed); }

    // False where the queue is full; the caller is woken when it has room again.
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

    void wake();
};

// One thread's connections. Only its own thread uses what is not in the inbox.
class Receiver::Worker {
  public:
    explicit Worker(State& state)
        : state_(state),
          epoll_(epoll_create1(EPOLL_CLOEXEC), "Receiver: epoll_create1"),
          drained_(kPieceBytes) {
        epoll_event wanted{};
        wanted.events = EPOLLIN;
        wanted.data.ptr = nullptr;
        if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, bell_.get(), &wanted) != 0) throw_system(errno, "Receiver: epoll_ctl");
    }

    void give(std::unique_ptr<Connection> connection) {
        {
            const std::lock_guard<std::mutex> lock(inbox_mutex_);
            inbox_.push_back(std::move(connection));
        }
        ring();
    }

    void ring() { bell_.ring(); }

    void run() {
        std::array<epoll_event, kMostReady> ready;
        const double period_s = std::min(1.0, state_.options.stall_s / 2);
        Clock::time_point next_look = deadline_after(period_s);
        while (!state_.stop.load()) {
            const int count = epoll_wait(epoll_.get(), ready.data(), int(ready.size()), int(period_s * 1e3) + 1);
            for (int number = 0; number < count; ++number)
                if (ready[std::size_t(number)].data.ptr == nullptr)
                    answer_bell();
                else
                    serve(*static_cast<Connection*>(ready[std::size_t(number)].data.ptr));
            if (Clock::now() >= next_look) {
                end_stalled();
                next_look = deadline_after(period_s);
            }
            forget_ended();
        }
        for (auto& connection : connections_) abandon(*connection);
        state_.connections.fetch_sub(connections_.size());
        connections_.clear();
    }

  private:
    void answer_bell() {
        bell_.answer();
        std::vector<std::unique_ptr<Connection>> fresh;
        {
            const std::lock_guard<std::mutex> lock(inbox_mutex_);
            fresh.swap(inbox_);
        }
        const std::uint64_t life = state_.windows.life();
        for (auto& connection : connections_) {
            if (connection->life != life && !connection->ended) finish(*connection, Cause::fenced, 0);
            if (connection->parked) unpark(*connection);
        }
        for (auto& connection : fresh) {
            connections_.push_back(std::move(connection));
            watch(*connections_.back());
        }
    }

    void watch(Connection& connection) {
        epoll_event wanted{};
        wanted.events = EPOLLIN | EPOLLRDHUP;
        wanted.data.ptr = &connection;
        if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, connection.descriptor.get(), &wanted) != 0)
            finish(connection, Cause::broken, errno);
    }

    void park(Connection& connection) {
        if (connection.parked) return;
        connection.parked = true;
        state_.parked.fetch_add(1);
        epoll_event ignored{};
        // An ended connection is not watched any more.
        (void)epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, connection.descriptor.get(), &ignored);
    }

    void unpark(Connection& connection) {
        connection.parked = false;
        state_.parked.fetch_sub(1);
        connection.progress = Clock::now();
        if (!connection.ended) watch(connection);
        // What it waits for may be in its header already, where no poll would see it.
        serve(connection);
    }

    // Reads on until there is nothing to read, it must wait, or others have had to wait long enough.
    void serve(Connection& connection) {
        if (connection.parked) return;
        std::uint64_t turn = 0;
        for (;;) {
            if (!deliver(connection)) return park(connection);
            if (connection.ended) return;
            if (connection.mode == Connection::Mode::header && connection.header_bytes == kHeaderBytes) {
                if (!begin_record(connection)) return;
                continue;
            }
            // Only here, where nothing is left that no poll would tell of.
            if (turn >= kTurnBytes) return;
            const std::int64_t count = read_some(connection);
            if (count < 0) return;
            turn += std::uint64_t(count);
        }
    }

    // Puts what has happened into the queue. False where it must wait for room.
    bool deliver(Connection& connection) {
        std::size_t given = 0;
        while (given < connection.waiting_events && state_.push(connection.events[given])) ++given;
        std::copy(connection.events.begin() + std::ptrdiff_t(given),
                  connection.events.begin() + std::ptrdiff_t(connection.waiting_events), connection.events.begin());
        connection.waiting_events -= given;
        return connection.waiting_events == 0;
    }

    ReceiverEvent& tell(Connection& connection, ReceiverEvent::Kind kind) {
        ReceiverEvent& event = connection.events[connection.waiting_events++];
        event = ReceiverEvent{};
        event.kind = kind;
        event.connection = connection.number;
        event.rank = connection.rank;
        event.iteration = connection.record.iteration;
        event.bucket = connection.record.bucket;
        event.life = connection.life;
        return event;
    }

    // A header has arrived. False where the connection waits for its window, or is read no more.
    bool begin_record(Connection& connection) {
        Record& record = connection.record;
        const Cause wrong = parse_header(connection.header, record);
        if (wrong != Cause::count) return finish(connection, wrong, 0);
        if (record.job != state_.job) return finish(connection, Cause::wrong_job, 0);
        Cause cause = Cause::wrong_rank;
        auto verdict = Windows::Verdict::refused;
        if (record.rank == connection.rank)
            verdict = state_.windows.examine(record, connection.life, connection.reservation, cause);
        switch (verdict) {
            case Windows::Verdict::fenced:
                return finish(connection, Cause::fenced, 0);
            case Windows::Verdict::parked:
                park(connection);
                return false;
            case Windows::Verdict::refused:
                state_.count(cause);
                connection.mode = Connection::Mode::draining;
                break;
            case Windows::Verdict::accepted:
                connection.mode = Connection::Mode::receiving;
                break;
        }
        connection.header_bytes = 0;
        connection.done = 0;
        connection.checksum = 0;
        if (record.kind == RecordKind::end) {
            connection.mode = Connection::Mode::header;
            if (verdict == Windows::Verdict::accepted) {
                state_.ends.fetch_add(1);
                tell(connection, ReceiverEvent::Kind::end);
            }
        } else if (record.length == 0) {
            end_record(connection);
        }
        return true;
    }

    // One read: a piece of the payload where it belongs, and behind its last piece the next header. Returns the bytes,
    // or -1 where the connection has no more for now.
    std::int64_t read_some(Connection& connection) {
        iovec parts[2];
        int count = 0;
        std::uint64_t wanted = 0;
        bool inside = false;
        if (connection.mode == Connection::Mode::receiving) {
            inside = state_.windows.enter(connection.reservation);
            if (!inside) lose_slot(connection);
        }
        if (connection.mode != Connection::Mode::header) {
            wanted = std::min(connection.record.length - connection.done, kPieceBytes);
            void* const target =
                inside ? static_cast<void*>(connection.reservation.address + connection.done) : drained_.data();
            parts[count++] = {target, std::size_t(wanted)};
        }
        if (connection.done + wanted == connection.record.length)
            parts[count++] = {connection.header.data() + connection.header_bytes,
                              kHeaderBytes - connection.header_bytes};
        msghdr message{};
        message.msg_iov = parts;
        message.msg_iovlen = std::size_t(count);
        ssize_t got;
        do {
            got = recvmsg(connection.descriptor.get(), &message, MSG_DONTWAIT);
        } while (got < 0 && errno == EINTR);
        const int number = errno;
        const std::uint64_t payload = got > 0 ? std::min(std::uint64_t(got), wanted) : 0;
        if (inside) {
            if (payload > 0) {
                const auto begin = Clock::now();
                connection.checksum =
                    crc32c(connection.reservation.address + connection.done, payload, connection.checksum);
                state_.checksum_ns.fetch_add(std::uint64_t(std::chrono::nanoseconds(Clock::now() - begin).count()),
                                             std::memory_order_relaxed);
            }
            state_.windows.leave(connection.reservation);
        }
        if (got <= 0) {
            if (got < 0 && (number == EAGAIN || number == EWOULDBLOCK)) return -1;
            const bool between = connection.mode == Connection::Mode::header && connection.header_bytes == 0;
            finish(connection, got < 0 ? Cause::broken : between ? Cause::count : Cause::truncated,
                   got < 0 ? number : 0);
            return -1;
        }
        connection.progress = Clock::now();
        connection.done += payload;
        if (connection.mode == Connection::Mode::draining)
            state_.drained_bytes.fetch_add(payload, std::memory_order_relaxed);
        connection.header_bytes += std::size_t(std::uint64_t(got) - payload);
        if (connection.mode != Connection::Mode::header && connection.done == connection.record.length)
            end_record(connection);
        return got;
    }

    // The window has moved past a record while its payload came.
    void lose_slot(Connection& connection) {
        state_.count(Cause::old_iteration);
        connection.mode = Connection::Mode::draining;
    }

    void end_record(Connection& connection) {
        const bool received = connection.mode == Connection::Mode::receiving;
        if (received && connection.checksum != connection.record.checksum) {
            state_.windows.release(connection.reservation);
            state_.count(Cause::damaged_payload);
        } else if (received) {
            const Windows::Held held = state_.windows.hold(connection.reservation);
            if (held == Windows::Held::lost) {
                state_.count(Cause::old_iteration);
            } else {
                state_.records.fetch_add(1, std::memory_order_relaxed);
                state_.bytes.fetch_add(connection.record.length, std::memory_order_relaxed);
            }
            if (held == Windows::Held::complete) tell(connection, ReceiverEvent::Kind::complete);
        }
        connection.mode = Connection::Mode::header;
        connection.done = 0;
        connection.record.length = 0;
    }

    // Ends a connection; its event goes out as soon as the queue has room. Returns false: nothing is read any more.
    bool finish(Connection& connection, Cause cause, int number) {
        if (cause != Cause::count && cause != Cause::fenced) state_.count(cause);
        abandon(connection);
        ReceiverEvent& event = tell(connection, ReceiverEvent::Kind::closed);
        event.cause = cause;
        event.error = number;
        connection.ended = true;
        if (!deliver(connection)) park(connection);
        return false;
    }

    void abandon(Connection& connection) {
        if (connection.mode == Connection::Mode::receiving) state_.windows.release(connection.reservation);
        connection.mode = Connection::Mode::header;
        (void)shutdown(connection.descriptor.get(), SHUT_RDWR);
    }

    void end_stalled() {
        const auto longest = std::chrono::duration<double>(state_.options.stall_s);
        for (auto& connection : connections_) {
            const bool begun = connection->mode != Connection::Mode::header || connection->header_bytes != 0;
            if (begun && !connection->parked && !connection->ended && Clock::now() - connection->progress > longest)
                finish(*connection, Cause::stalled, 0);
        }
    }

    void forget_ended() {
        const auto gone = std::remove_if(connections_.begin(), connections_.end(), [](const auto& connection) {
            return connection->ended && connection->waiting_events == 0;
        });
        state_.connections.fetch_sub(std::uint64_t(connections_.end() - gone));
        connections_.erase(gone, connections_.end());
    }

    State& state_;
    const Descriptor epoll_;
    Bell bell_;
    std::vector<unsigned char> drained_;
    std::vector<std::unique_ptr<Connection>> connections_;
    std::mutex inbox_mutex_;
    std::vector<std::unique_ptr<Connection>> inbox_;
};

void Receiver::State::wake() {
    for (auto& worker : workers) worker->ring();
}

Receiver::Receiver(std::uint64_t job, std::uint32_t epoch, const std::vector<DeclaredBucket>& buckets,
                   const std::vector<std::vector<std::uintptr_t>>& slots, const ReceiverOptions& options)
    : owner_(getpid()) {
    if (options.threads == 0 || options.queue == 0)
        throw std::invalid_argument("Receiver: threads and queue must be at least 1");
    if (!(options.stall_s > 0)) throw std::invalid_argument("Receiver: stall_s must be more than 0");
    state_ = std::make_shared<State>(job, epoch, buckets, slots, options);
    const SignalsBlocked blocked;
    try {
        for (unsigned number = 0; number < options.threads; ++number)
            state_->workers.push_back(std::make_unique<Worker>(*state_));
        for (unsigned number = 0; number < options.threads; ++number) {
            {
                const std::lock_guard<std::mutex> lock(state_->mutex);
                ++state_->live;
            }
            try {
                state_->threads.emplace_back([state = state_, worker = state_->workers[number].get()] {
                    worker->run();
                    const std::lock_guard<std::mutex> lock(state->mutex);
                    --state->live;
                    state->progress.notify_all();
                });
            } catch (...) {
                const std::lock_guard<std::mutex> lock(state_->mutex);
                --state_->live;
                throw;
            }
            if (!options.cpus.empty())
                pin_thread(state_->threads.back(), options.cpus[number % options.cpus.size()], "a receiver thread");
        }
    } catch (...) {
        shut_down();
        throw;
    }
}

Receiver::~Receiver() { shut_down(); }

void Receiver::shut_down() {
    if (!state_) return;
    if (forked()) {
        // A fork copied the object but not its threads: locks may be held by nobody, so all of it is left alone.
        for (std::thread& thread : state_->threads) thread.detach();
        new std::shared_ptr<State>(std::move(state_));
        return;
    }
    if (!close(deadline_after(kDestructorWaitS)))
        for (std::thread& thread : state_->threads) thread.detach();
    state_.reset();
}

std::uint64_t Receiver::add(int fd, std::uint32_t rank) {
    State& state = *state_;
    std::unique_ptr<Connection> connection;
    Worker* worker;
    {
        const std::lock_guard<std::mutex> lock(state.mutex);
        if (state.stop.load()) throw std::logic_error("Receiver: add() after close()");
        connection = std::make_unique<Connection>(fd, state.next_connection++, rank, state.life);
        worker = state.workers[state.next_worker++ % state.workers.size()].get();
    }
    const std::uint64_t number = connection->number;
    state.connections.fetch_add(1);
    worker->give(std::move(connection));
    return number;
}

void Receiver::advance(std::uint64_t first) {
    state_->windows.advance(first);
    state_->wake();
}

bool Receiver::set_first(std::uint32_t bucket, std::uint64_t first) {
    const bool placed = state_->windows.set_first(bucket, first);
    state_->wake();
    return placed;
}

void Receiver::reset(std::uint32_t bucket) {
    state_->windows.reset(bucket);
    state_->wake();
}

void Receiver::begin(std::uint32_t epoch, bool keep) {
    {
        const std::lock_guard<std::mutex> lock(state_->mutex);
        state_->windows.begin(epoch, keep);
        state_->life = state_->windows.life();
        std::deque<ReceiverEvent>& queue = state_->queue;
        queue.erase(std::remove_if(queue.begin(), queue.end(),
                                   [](const ReceiverEvent& event) { return event.kind != ReceiverEvent::Kind::closed; }),
                    queue.end());
    }
    state_->wake();
}

const Windows& Receiver::windows() const { return state_->windows; }

std::vector<ReceiverEvent> Receiver::poll(std::size_t most, Clock::time_point deadline, const Tick& tick) {
    State& state = *state_;
    std::vector<ReceiverEvent> events;
    bool room = false;
    {
        std::unique_lock<std::mutex> lock(state.mutex);
        while (state.queue.empty() && !state.stop.load()) {
            if (Clock::now() >= deadline) return events;
            state.progress.wait_until(lock, std::min(deadline, Clock::now() + kTickPeriod));
            if (tick) {
                lock.unlock();
                tick();
                lock.lock();
            }
        }
        while (!state.queue.empty() && events.size() < most) {
            events.push_back(state.queue.front());
            state.queue.pop_front();
        }
        if (!events.empty()) std::swap(room, state.blocked);
    }
    if (room) state.wake();
    return events;
}

ReceiverCounters Receiver::counters() const {
    const State& state = *state_;
    return {state.records.load(), state.bytes.load(),  state.drained_bytes.load(),        state.ends.load(),
            state.connections.load(), state.parked.load(), double(state.checksum_ns.load()) * 1e-9};
}

std::map<std::string, std::uint64_t> Receiver::refused() const {
    std::map<std::string, std::uint64_t> found;
    for (std::size_t number = 0; number < state_->refused.size(); ++number)
        if (const std::uint64_t count = state_->refused[number].load()) found[cause_name(Cause(number))] = count;
    return found;
}

bool Receiver::close(Clock::time_point deadline) {
    State& state = *state_;
    std::vector<std::thread> ended;
    {
        std::unique_lock<std::mutex> lock(state.mutex);
        state.stop.store(true);
        state.wake();
        state.progress.notify_all();
        if (!state.progress.wait_until(lock, deadline, [&state] { return state.live == 0; })) return false;
        ended.swap(state.threads);
    }
    for (std::thread& thread : ended) thread.join();
    return true;
}

bool Receiver::forked() const { return getpid() != owner_; }

}  // namespace lastgood

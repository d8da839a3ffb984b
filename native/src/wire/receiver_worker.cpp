#include "wire/receiver_worker.hpp"

#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <utility>

#include "storage/crc32c.hpp"

namespace lastgood {
namespace {

constexpr std::uint64_t kPieceBytes = 256 << 10;  // of one read: still in the cache when its checksum is taken
constexpr std::uint64_t kTurnBytes = 4 << 20;     // of one connection, before the next one of its thread has its turn
constexpr std::size_t kMostReady = 64;

}  // namespace

ReceiverWorker::ReceiverWorker(ReceiverHub& hub)
    : hub_(hub), epoll_(epoll_create1(EPOLL_CLOEXEC), "Receiver: epoll_create1"), drained_(kPieceBytes) {
    epoll_event wanted{};
    wanted.events = EPOLLIN;
    wanted.data.ptr = nullptr;
    if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, bell_.get(), &wanted) != 0) throw_system(errno, "Receiver: epoll_ctl");
}

void ReceiverWorker::give(std::unique_ptr<Connection> connection) {
    {
        const std::lock_guard<std::mutex> lock(inbox_mutex_);
        inbox_.push_back(std::move(connection));
    }
    ring();
}

void ReceiverWorker::run() {
    std::array<epoll_event, kMostReady> ready;
    const double period_s = std::min(1.0, hub_.options.stall_s / 2);
    Clock::time_point next_look = deadline_after(period_s);
    while (!hub_.stop.load()) {
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
    hub_.connections.fetch_sub(connections_.size());
    connections_.clear();
}

void ReceiverWorker::answer_bell() {
    bell_.answer();
    std::vector<std::unique_ptr<Connection>> fresh;
    {
        const std::lock_guard<std::mutex> lock(inbox_mutex_);
        fresh.swap(inbox_);
    }
    for (auto& connection : fresh) {
        connections_.push_back(std::move(connection));
        watch(*connections_.back());
    }
    // Behind the new ones: a life may have begun since they were added.
    const std::uint64_t life = hub_.windows.life();
    for (auto& connection : connections_) {
        if (connection->life != life && !connection->ended) finish(*connection, Cause::fenced, 0);
        if (connection->parked) unpark(*connection);
    }
}

void ReceiverWorker::watch(Connection& connection) {
    epoll_event wanted{};
    wanted.events = EPOLLIN | EPOLLRDHUP;
    wanted.data.ptr = &connection;
    if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, connection.descriptor.get(), &wanted) != 0)
        finish(connection, Cause::broken, errno);
}

void ReceiverWorker::park(Connection& connection) {
    if (connection.parked) return;
    connection.parked = true;
    hub_.parked.fetch_add(1);
    unwatch(connection);
}

void ReceiverWorker::unwatch(Connection& connection) {
    epoll_event ignored{};
    // Fails where it is not watched, which is as good.
    (void)epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, connection.descriptor.get(), &ignored);
}

void ReceiverWorker::unpark(Connection& connection) {
    connection.parked = false;
    hub_.parked.fetch_sub(1);
    connection.progress = Clock::now();
    if (!connection.ended) watch(connection);
    // What it waits for may be in its header already, where no poll would see it.
    serve(connection);
}

void ReceiverWorker::serve(Connection& connection) {
    if (connection.parked) return;
    // Counted behind all that follows from them.
    hub_.read_bytes.fetch_add(read_turn(connection));
}

std::uint64_t ReceiverWorker::read_turn(Connection& connection) {
    std::uint64_t turn = 0;
    for (;;) {
        if (!deliver(connection)) {
            park(connection);
            return turn;
        }
        if (connection.ended) return turn;
        if (connection.mode == Connection::Mode::header && connection.header_bytes == kHeaderBytes) {
            if (!begin_record(connection)) return turn;
            continue;
        }
        // Only here, where nothing is left that no poll would tell of.
        if (turn >= kTurnBytes) return turn;
        const std::int64_t count = read_some(connection);
        if (count < 0) return turn;
        turn += std::uint64_t(count);
    }
}

bool ReceiverWorker::deliver(Connection& connection) {
    std::size_t given = 0;
    while (given < connection.waiting_events && hub_.push(connection.events[given])) ++given;
    std::copy(connection.events.begin() + std::ptrdiff_t(given),
              connection.events.begin() + std::ptrdiff_t(connection.waiting_events), connection.events.begin());
    connection.waiting_events -= given;
    return connection.waiting_events == 0;
}

ReceiverEvent& ReceiverWorker::tell(Connection& connection, ReceiverEvent::Kind kind) {
    ReceiverEvent& event = connection.events[connection.waiting_events++];
    event = ReceiverEvent{};
    event.kind = kind;
    event.connection = connection.number;
    event.rank = connection.rank;
    event.life = connection.life;
    return event;
}

bool ReceiverWorker::begin_record(Connection& connection) {
    Record& record = connection.record;
    const Cause wrong = parse_header(connection.header, record);
    if (wrong != Cause::count) return finish(connection, wrong, 0);
    if (record.job != hub_.job) return finish(connection, Cause::wrong_job, 0);
    Cause cause = Cause::wrong_rank;
    auto verdict = Windows::Verdict::refused;
    if (record.rank == connection.rank)
        verdict = hub_.windows.examine(record, connection.life, connection.reservation, cause);
    switch (verdict) {
        case Windows::Verdict::fenced:
            return finish(connection, Cause::fenced, 0);
        case Windows::Verdict::parked:
            park(connection);
            return false;
        case Windows::Verdict::refused:
            hub_.count(cause);
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
            hub_.ends.fetch_add(1);
            tell(connection, ReceiverEvent::Kind::end).iteration = record.iteration;
        }
    } else if (record.length == 0) {
        end_record(connection);
    }
    return true;
}

std::int64_t ReceiverWorker::read_some(Connection& connection) {
    iovec parts[2];
    int count = 0;
    std::uint64_t wanted = 0;
    bool inside = false;
    if (connection.mode == Connection::Mode::receiving) {
        inside = hub_.windows.enter(connection.reservation);
        if (!inside) lose_slot(connection);
    }
    if (connection.mode != Connection::Mode::header) {
        wanted = std::min(connection.record.length - connection.done, kPieceBytes);
        void* const target =
            inside ? static_cast<void*>(connection.reservation.address + connection.done) : drained_.data();
        parts[count++] = {target, std::size_t(wanted)};
    }
    if (connection.done + wanted == connection.record.length)
        parts[count++] = {connection.header.data() + connection.header_bytes, kHeaderBytes - connection.header_bytes};
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
            hub_.checksum_ns.fetch_add(std::uint64_t(std::chrono::nanoseconds(Clock::now() - begin).count()),
                                       std::memory_order_relaxed);
        }
        hub_.windows.leave(connection.reservation);
    }
    if (got <= 0) {
        if (got < 0 && (number == EAGAIN || number == EWOULDBLOCK)) return -1;
        const bool between = connection.mode == Connection::Mode::header && connection.header_bytes == 0;
        finish(connection, got < 0 ? Cause::broken : between ? Cause::count : Cause::truncated, got < 0 ? number : 0);
        return -1;
    }
    connection.progress = Clock::now();
    connection.done += payload;
    if (connection.mode == Connection::Mode::draining) hub_.drained_bytes.fetch_add(payload, std::memory_order_relaxed);
    connection.header_bytes += std::size_t(std::uint64_t(got) - payload);
    if (connection.mode != Connection::Mode::header && connection.done == connection.record.length)
        end_record(connection);
    return got;
}

void ReceiverWorker::lose_slot(Connection& connection) {
    hub_.count(Cause::old_iteration);
    connection.mode = Connection::Mode::draining;
}

void ReceiverWorker::end_record(Connection& connection) {
    const bool received = connection.mode == Connection::Mode::receiving;
    if (received && connection.checksum != connection.record.checksum) {
        hub_.windows.release(connection.reservation);
        hub_.count(Cause::damaged_payload);
    } else if (received) {
        const Windows::Held held = hub_.windows.hold(connection.reservation);
        if (held == Windows::Held::lost) {
            hub_.count(Cause::old_iteration);
        } else {
            hub_.records.fetch_add(1, std::memory_order_relaxed);
            hub_.bytes.fetch_add(connection.record.length, std::memory_order_relaxed);
        }
        if (held == Windows::Held::complete) {
            ReceiverEvent& event = tell(connection, ReceiverEvent::Kind::complete);
            event.bucket = connection.record.bucket;
            event.iteration = connection.record.iteration;
        }
    }
    connection.mode = Connection::Mode::header;
    connection.done = 0;
    connection.record.length = 0;
}

bool ReceiverWorker::finish(Connection& connection, Cause cause, int number) {
    if (cause != Cause::count && cause != Cause::fenced) hub_.count(cause);
    abandon(connection);
    // Closing would not do: as long as anybody else holds a duplicate, it would be watched on.
    unwatch(connection);
    ReceiverEvent& event = tell(connection, ReceiverEvent::Kind::closed);
    event.cause = cause;
    event.error = number;
    connection.ended = true;
    if (!deliver(connection)) park(connection);
    return false;
}

void ReceiverWorker::abandon(Connection& connection) {
    if (connection.mode == Connection::Mode::receiving) hub_.windows.release(connection.reservation);
    connection.mode = Connection::Mode::header;
    (void)shutdown(connection.descriptor.get(), SHUT_RDWR);
}

void ReceiverWorker::end_stalled() {
    const auto longest = std::chrono::duration<double>(hub_.options.stall_s);
    for (auto& connection : connections_) {
        const bool begun = connection->mode != Connection::Mode::header || connection->header_bytes != 0;
        if (begun && !connection->parked && !connection->ended && Clock::now() - connection->progress > longest)
            finish(*connection, Cause::stalled, 0);
    }
}

void ReceiverWorker::forget_ended() {
    const auto gone = std::remove_if(connections_.begin(), connections_.end(), [](const auto& connection) {
        return connection->ended && connection->waiting_events == 0;
    });
    hub_.connections.fetch_sub(std::uint64_t(connections_.end() - gone));
    connections_.erase(gone, connections_.end());
}

}  // namespace lastgood

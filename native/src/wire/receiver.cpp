#include "wire/receiver.hpp"

#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>

#include "wire/receiver_worker.hpp"

namespace lastgood {
namespace {

constexpr double kDestructorWaitS = 5.0;

}  // namespace

// Everything that threads touch. They share its ownership, so that none can outlive what it uses.
struct Receiver::State : ReceiverHub {
    using ReceiverHub::ReceiverHub;

    void wake() {
        for (auto& worker : workers) worker->ring();
    }

    std::uint64_t next_connection = 1;
    std::size_t next_worker = 0;
    std::size_t live = 0;
    std::vector<std::unique_ptr<ReceiverWorker>> workers;
    std::vector<std::thread> threads;
};

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
            state_->workers.push_back(std::make_unique<ReceiverWorker>(*state_));
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

bool Receiver::shut_down() {
    if (!state_) return true;
    if (forked()) {
        // A fork copied the object but not its threads: locks may be held by nobody, so all of it is left alone.
        for (std::thread& thread : state_->threads) thread.detach();
        new std::shared_ptr<State>(std::move(state_));
        return true;
    }
    const bool ended = close(deadline_after(kDestructorWaitS));
    if (!ended)
        for (std::thread& thread : state_->threads) thread.detach();
    state_.reset();
    return ended;
}

std::uint64_t Receiver::add(int fd, std::uint32_t rank) {
    State& state = *state_;
    std::unique_ptr<Connection> connection;
    ReceiverWorker* worker;
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
        queue.erase(
            std::remove_if(queue.begin(), queue.end(),
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
    return {state.records.load(),    state.bytes.load(),
            state.read_bytes.load(), state.drained_bytes.load(),
            state.ends.load(),       state.connections.load(),
            state.parked.load(),     double(state.checksum_ns.load()) * 1e-9};
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

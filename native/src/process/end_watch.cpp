#include "process/end_watch.hpp"

#include <fcntl.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <mutex>
#include <system_error>
#include <thread>

namespace lastgood {
namespace {

using Clock = std::chrono::steady_clock;

struct Watch {
    int signalled = -1;  // written by the handler
    int told = -1;       // read by Python
    pid_t owner = 0;
    std::mutex mutex;
    std::condition_variable changed;
    std::atomic<std::uint64_t> signals{0};
    std::uint64_t answered = 0;  // so many of them were
    bool armed = false;
    bool done = false;
    std::chrono::duration<double> patience{0};
    std::chrono::duration<double> limit{0};
};

// Never deleted: the thread and the handler outlive everything else. A forked child makes one of its own, since it has
// no thread, and perhaps a mutex that was locked when it was forked.
std::atomic<Watch*> current{nullptr};
struct sigaction before;  // set before the handler is

void on_signal(int number, siginfo_t* info, void* context) {
    const int error = errno;
    Watch* watch = current.load();
    if (watch != nullptr && watch->owner == getpid()) {
        ++watch->signals;
        const std::uint64_t one = 1;
        [[maybe_unused]] const ssize_t written = write(watch->signalled, &one, sizeof one);
    }
    if ((before.sa_flags & SA_SIGINFO) != 0) {
        before.sa_sigaction(number, info, context);
    } else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
        before.sa_handler(number);
    }
    errno = error;
}

bool is_ours(const struct sigaction& action) {
    return (action.sa_flags & SA_SIGINFO) != 0 && action.sa_sigaction == on_signal;
}

[[noreturn]] void end_process() {
    struct sigaction plain = {};
    plain.sa_handler = SIG_DFL;
    sigaction(SIGTERM, &plain, nullptr);
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGTERM);
    pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);
    kill(getpid(), SIGTERM);
    // The first process of a container gets no signal that it has no handler for.
    std::this_thread::sleep_for(std::chrono::seconds(1));
    _exit(128 + SIGTERM);
}

void run(Watch* watch) {
    for (;;) {
        std::uint64_t count = 0;
        if (read(watch->signalled, &count, sizeof count) < 0) {
            if (errno == EINTR) continue;
            return;
        }
        const auto asked = Clock::now();
        std::unique_lock<std::mutex> lock(watch->mutex);
        if (!watch->armed) continue;
        const std::uint64_t last = watch->signals;
        const auto patience = std::chrono::duration_cast<Clock::duration>(watch->patience);
        if (watch->changed.wait_until(lock, asked + patience,
                                      [&] { return watch->answered >= last || !watch->armed; })) {
            continue;
        }
        const std::uint64_t one = 1;
        [[maybe_unused]] const ssize_t written = write(watch->told, &one, sizeof one);
        const auto limit = std::chrono::duration_cast<Clock::duration>(watch->limit);
        if (!watch->changed.wait_until(lock, asked + limit, [&] { return watch->done; })) {
            dprintf(2, "lastgood: SIGTERM was not answered in %.3g s; the process ends now\n", watch->limit.count());
        }
        end_process();
    }
}

// The watch of this process, if it has one.
Watch* mine() {
    Watch* watch = current.load();
    return watch != nullptr && watch->owner == getpid() ? watch : nullptr;
}

Watch* make_watch() {
    auto* watch = new Watch;
    watch->owner = getpid();
    watch->signalled = eventfd(0, EFD_CLOEXEC);
    watch->told = eventfd(0, EFD_CLOEXEC);
    if (watch->signalled < 0 || watch->told < 0) {
        throw std::system_error(errno, std::generic_category(), "eventfd");
    }
    // All signals go to the program's threads.
    sigset_t all;
    sigset_t old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    try {
        std::thread(run, watch).detach();
    } catch (...) {
        pthread_sigmask(SIG_SETMASK, &old, nullptr);
        throw;
    }
    pthread_sigmask(SIG_SETMASK, &old, nullptr);
    return watch;
}

}  // namespace

int end_watch_begin() {
    Watch* watch = mine();
    if (watch == nullptr) {
        watch = make_watch();
        current.store(watch);
    }
    {
        const std::lock_guard<std::mutex> lock(watch->mutex);
        watch->armed = true;
    }
    struct sigaction found = {};
    sigaction(SIGTERM, nullptr, &found);
    if (!is_ours(found)) {
        before = found;
        struct sigaction ours = found;
        ours.sa_flags |= SA_SIGINFO;
        ours.sa_sigaction = on_signal;
        sigaction(SIGTERM, &ours, nullptr);
    }
    return watch->told;
}

void end_watch_limits(double patience_s, double limit_s) {
    if (Watch* watch = mine()) {
        const std::lock_guard<std::mutex> lock(watch->mutex);
        watch->patience = std::chrono::duration<double>(patience_s);
        watch->limit = std::chrono::duration<double>(limit_s);
    }
}

void end_watch_answered() {
    if (Watch* watch = mine()) {
        const std::lock_guard<std::mutex> lock(watch->mutex);
        watch->answered = watch->signals;
        watch->changed.notify_all();
    }
}

void end_watch_done() {
    if (Watch* watch = mine()) {
        const std::lock_guard<std::mutex> lock(watch->mutex);
        watch->done = true;
        watch->changed.notify_all();
    }
}

void end_watch_stop() {
    struct sigaction found = {};
    sigaction(SIGTERM, nullptr, &found);
    if (is_ours(found)) sigaction(SIGTERM, &before, nullptr);
    if (Watch* watch = mine()) {
        const std::lock_guard<std::mutex> lock(watch->mutex);
        watch->armed = false;
        watch->changed.notify_all();
    }
}

}  // namespace lastgood

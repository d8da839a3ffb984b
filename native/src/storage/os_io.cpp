#include "storage/os_io.hpp"

#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>

namespace lastgood {
namespace {

constexpr unsigned kMostShortReads = 3;  // of one block; at the end of a file every one is

std::string describe(int number, const std::string& operation, std::uint64_t offset, std::uint64_t nbytes) {
    return operation + " of " + std::to_string(nbytes) + " bytes at offset " + std::to_string(offset) + ": " +
           std::strerror(number);
}

}  // namespace

OsError::OsError(int number, std::string operation, std::uint64_t offset, std::uint64_t nbytes)
    : std::runtime_error(describe(number, operation, offset, nbytes)),
      number(number),
      operation(std::move(operation)),
      offset(offset),
      nbytes(nbytes) {}

OsError cancelled(const char* operation) { return OsError(ECANCELED, operation, 0, 0); }

Clock::time_point deadline_after(double seconds) {
    const double bounded = std::min(std::max(seconds, 0.0), 1e8);
    return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(bounded));
}

bool write_fully(int fd, const void* data, std::uint64_t nbytes, std::uint64_t offset, const std::atomic<bool>& stop) {
    const auto* at = static_cast<const char*>(data);
    std::uint64_t done = 0;
    while (done < nbytes) {
        if (stop.load()) return false;
        const ssize_t written = pwrite(fd, at + done, nbytes - done, off_t(offset + done));
        if (written < 0) {
            if (errno == EINTR) continue;
            throw OsError(errno, "write", offset + done, nbytes - done);
        }
        // Direct I/O goes on from an aligned place. A short write without one whole block of progress (a size limit or
        // a full disk inside a block) would repeat for ever.
        const std::uint64_t whole = std::uint64_t(written) == nbytes - done
                                        ? std::uint64_t(written)
                                        : std::uint64_t(written) & ~std::uint64_t(kAlignment - 1);
        if (whole == 0) throw OsError(ENOSPC, "write", offset + done, nbytes - done);
        done += whole;
    }
    return true;
}

bool is_buffered(int fd) {
#ifdef O_DIRECT
    const int flags = fcntl(fd, F_GETFL);
    return flags < 0 || (flags & O_DIRECT) == 0;
#else
    (void)fd;
    return true;
#endif
}

void start_writeback(int fd, std::uint64_t offset, std::uint64_t nbytes) {
#ifdef SYNC_FILE_RANGE_WRITE
    // An error is not lost: the flush before the commit reports it.
    (void)sync_file_range(fd, off_t(offset), off_t(nbytes), SYNC_FILE_RANGE_WRITE);
#else
    (void)fd, (void)offset, (void)nbytes;
#endif
}

void read_fully(int fd, void* data, std::uint64_t nbytes, std::uint64_t offset) {
    auto* at = static_cast<char*>(data);
    std::uint64_t done = 0;
    unsigned without_progress = 0;
    while (done < nbytes) {
        const std::uint64_t rest = nbytes - done;
        const ssize_t got = pread(fd, at + done, rest, off_t(offset + done));
        if (got < 0) {
            if (errno == EINTR) continue;
            throw OsError(errno, "read", offset + done, rest);
        }
        if (got == 0) throw OsError(ENODATA, "read", offset + done, rest);
        if (std::uint64_t(got) == rest) return;
        // A read that ends inside a block has met the end of the file, or was short: direct I/O goes on from the
        // block's begin, and only the end of the file is met again.
        const std::uint64_t whole = std::uint64_t(got) & ~std::uint64_t(kAlignment - 1);
        if (whole == 0 && ++without_progress > kMostShortReads) throw OsError(ENODATA, "read", offset + done, rest);
        done += whole;
    }
}

void prefill(int fd, std::uint64_t offset, std::uint64_t nbytes) {
    if (offset % kAlignment != 0 || nbytes % kAlignment != 0)
        throw std::invalid_argument("prefill: offset and length must be multiples of 4096");
    if (nbytes == 0) return;
    const std::uint64_t block = std::min<std::uint64_t>(nbytes, 4 << 20);
    const MappedMemory zeros(block);
    const std::atomic<bool> never{false};
    for (std::uint64_t done = 0; done < nbytes;) {
        const std::uint64_t step = std::min(block, nbytes - done);
        write_fully(fd, zeros.data(), step, offset + done, never);
        done += step;
    }
}

OwnDescriptor::OwnDescriptor(int fd) : fd_(fcntl(fd, F_DUPFD_CLOEXEC, 0)) {
    if (fd_ < 0) throw OsError(errno, "dup", 0, 0);
}

OwnDescriptor::~OwnDescriptor() { close(fd_); }

MappedMemory::MappedMemory(std::size_t nbytes) : nbytes_(nbytes) {
    void* mapped = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) throw OsError(errno, "mmap", 0, nbytes);
    data_ = static_cast<std::byte*>(mapped);
#ifdef MADV_HUGEPAGE
    madvise(mapped, nbytes, MADV_HUGEPAGE);  // a wish only
#endif
    for (std::size_t at = 0; at < nbytes; at += kAlignment) data_[at] = std::byte{0};
}

MappedMemory::~MappedMemory() { munmap(data_, nbytes_); }

SignalsBlocked::SignalsBlocked() {
    static_assert(sizeof(sigset_t) <= sizeof(saved_), "sigset_t grew");
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, reinterpret_cast<sigset_t*>(saved_));
}

SignalsBlocked::~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, reinterpret_cast<sigset_t*>(saved_), nullptr); }

void pin_thread(std::thread& thread, int cpu, const std::string& what) {
    cpu_set_t one;
    CPU_ZERO(&one);
    if (cpu < 0 || cpu >= CPU_SETSIZE) throw OsError(EINVAL, "pinning of " + what, 0, 0);
    CPU_SET(cpu, &one);
    const int number = pthread_setaffinity_np(thread.native_handle(), sizeof(one), &one);
    if (number != 0) throw OsError(number, "pinning of " + what, 0, 0);
}

}  // namespace lastgood

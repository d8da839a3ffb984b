// Positional reads and writes that finish what they start, and the errors and deadlines that all of storage shares.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>

namespace lastgood {

constexpr std::size_t kAlignment = 4096;  // of memory, length and offset; covers every logical sector size in use

constexpr std::uint64_t align_up(std::uint64_t value) {
    return (value + kAlignment - 1) & ~std::uint64_t(kAlignment - 1);
}

// What the operating system refused. Becomes Python's OSError with operation, offset and nbytes as attributes.
class OsError : public std::runtime_error {
  public:
    OsError(int number, std::string operation, std::uint64_t offset, std::uint64_t nbytes);

    int number;
    std::string operation;
    std::uint64_t offset;
    std::uint64_t nbytes;
};

// A bounded wait ended. Becomes Python's TimeoutError; the text names what was waited for.
class WaitEnded : public std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Work was given up on request. Becomes OSError(ECANCELED).
OsError cancelled(const char* operation);

using Clock = std::chrono::steady_clock;

// Now plus `seconds`; never overflows.
Clock::time_point deadline_after(double seconds);

// Called now and then by a waiting thread, so that Ctrl-C is seen; may throw.
using Tick = std::function<void()>;
constexpr std::chrono::milliseconds kTickPeriod{200};

// Writes everything or throws OsError; goes on after EINTR and short writes. Returns early, false, once `stop` is set.
bool write_fully(int fd, const void* data, std::uint64_t nbytes, std::uint64_t offset, const std::atomic<bool>& stop);

// Whether writes to this descriptor go through the page cache.
bool is_buffered(int fd);

// Lets the kernel begin to write what is in the page cache for this range, without waiting and without promise.
void start_writeback(int fd, std::uint64_t offset, std::uint64_t nbytes);

// Reads everything or throws OsError (ENODATA where the file ends too early).
void read_fully(int fd, void* data, std::uint64_t nbytes, std::uint64_t offset);

// Writes zeros over [offset, offset + nbytes), both multiples of kAlignment.
void prefill(int fd, std::uint64_t offset, std::uint64_t nbytes);

// A duplicate of a descriptor. Threads use their own, so that no write can reach another file that was given the
// number.
class OwnDescriptor {
  public:
    explicit OwnDescriptor(int fd);
    ~OwnDescriptor();
    OwnDescriptor(const OwnDescriptor&) = delete;
    OwnDescriptor& operator=(const OwnDescriptor&) = delete;
    int get() const { return fd_; }

  private:
    int fd_;
};

// Page-aligned memory from the kernel, touched page by page so that the first use does not fault.
class MappedMemory {
  public:
    explicit MappedMemory(std::size_t nbytes);
    ~MappedMemory();
    MappedMemory(const MappedMemory&) = delete;
    MappedMemory& operator=(const MappedMemory&) = delete;
    std::byte* data() const { return data_; }

  private:
    std::byte* data_ = nullptr;
    std::size_t nbytes_ = 0;
};

// While it lives, threads that are started inherit a mask that leaves every signal to Python's own threads.
class SignalsBlocked {
  public:
    SignalsBlocked();
    ~SignalsBlocked();
    SignalsBlocked(const SignalsBlocked&) = delete;
    SignalsBlocked& operator=(const SignalsBlocked&) = delete;

  private:
    alignas(16) unsigned char saved_[128];
};

// Keeps a thread on one processor, or throws OsError; `what` names the thread.
void pin_thread(std::thread& thread, int cpu, const std::string& what);

}  // namespace lastgood

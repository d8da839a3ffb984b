// What receiver and sender share of the operating system: descriptors, a bell that wakes a thread, errors.
#pragma once

#include <fcntl.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <string>
#include <system_error>

namespace lastgood {

[[noreturn]] inline void throw_system(int number, const std::string& what) {
    throw std::system_error(number, std::generic_category(), what);
}

// Owns a descriptor; `fd` is the result of the call that made it, and `what` that call.
class Descriptor {
  public:
    Descriptor(int fd, const char* what) : fd_(fd) {
        if (fd_ < 0) throw_system(errno, what);
    }
    ~Descriptor() { ::close(fd_); }
    Descriptor(const Descriptor&) = delete;
    Descriptor& operator=(const Descriptor&) = delete;
    int get() const { return fd_; }

  private:
    int fd_;
};

// A duplicate that a child process does not get, or -1. Threads use their own, so that none can reach another
// connection that was given the number.
inline int duplicate(int fd) { return fcntl(fd, F_DUPFD_CLOEXEC, 0); }

// Readable from ring() until answer(): wakes a thread that waits for descriptors.
class Bell {
  public:
    Bell() : descriptor_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "eventfd") {}
    void ring() {
        const std::uint64_t one = 1;
        // It can only fail where the counter is full, and then it has been rung.
        (void)!::write(descriptor_.get(), &one, sizeof(one));
    }
    void answer() {
        std::uint64_t rung;
        (void)!::read(descriptor_.get(), &rung, sizeof(rung));
    }
    int get() const { return descriptor_.get(); }

  private:
    const Descriptor descriptor_;
};

}  // namespace lastgood

// Sends gradient records over one connection, in the order in which they are given, from a thread of its own.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "storage/os_io.hpp"
#include "wire/record.hpp"

namespace lastgood {

struct SenderOptions {
    std::string destination;               // as errors name it
    std::uint64_t pool_bytes = 32 << 20;   // of payloads that are copied
    std::size_t queue = 4096;              // calls of put() that have not gone out, at most
    std::uint64_t record_bytes = 1 << 20;  // longer payloads go out as several records
    double stall_s = 60.0;                 // without a byte taken by the other side
    int cpu = -1;                          // the thread stays on it; -1: wherever the kernel likes
};

struct SenderCounters {
    std::uint64_t records = 0;  // that have gone out, ends among them
    std::uint64_t bytes = 0;    // of payloads that have gone out
    std::uint64_t sends = 0;    // system calls for them
    std::uint64_t queued = 0;   // calls of put() that have not gone out
    std::uint64_t queued_bytes = 0;
    double checksum_s = 0.0;
    double blocked_s = 0.0;  // waiting for the other side to take more
};

class Sender {
  public:
    // Starts the thread. `fd` is duplicated. All records carry job, epoch and rank.
    Sender(int fd, std::uint64_t job, std::uint32_t epoch, std::uint32_t rank, const SenderOptions& options);
    ~Sender();
    Sender(const Sender&) = delete;
    Sender& operator=(const Sender&) = delete;

    // Queues a payload, of which `record` says kind, flags, iteration, bucket, dtype and offset. Borrowed memory is
    // read until its ticket has returned; other memory is copied before put() returns. Returns the ticket, or 0 where
    // the queue has no room before the deadline.
    std::uint64_t put(const Record& record, const void* data, std::uint64_t nbytes, bool borrowed,
                      Clock::time_point deadline, const Tick& tick);

    // Whether all up to this ticket has gone out to the kernel, or never will: nothing of it is read any more.
    bool returned(std::uint64_t ticket) const;
    // Waits for that; false after the deadline. Throws std::system_error where the connection has failed.
    bool wait_returned(std::uint64_t ticket, Clock::time_point deadline, const Tick& tick);
    std::uint64_t last_ticket() const;
    // The operating system's number of what ended the connection (ECANCELED after abort()), or 0.
    int error() const;

    SenderCounters counters() const;

    // Sends what is queued, closes the connection and ends the thread. False, and all is given up, where that takes
    // longer than until the deadline.
    bool close(Clock::time_point deadline, const Tick& tick);
    // Gives up what is queued and ends the connection, without waiting; join() waits for the thread.
    void abort();
    // Where that fails the thread is left to itself in the end. It shares the ownership of all that it uses but lent
    // memory, which it may still read: as long as returned() says so.
    bool join(Clock::time_point deadline);
    // Whether this is a copy that a fork made, without the thread.
    bool forked() const;

  protected:
    // What the destructor does; for a derived class that must do it before its own end.
    void shut_down();

  private:
    struct State;

    std::shared_ptr<State> state_;
    pid_t owner_;
};

}  // namespace lastgood

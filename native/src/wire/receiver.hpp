// Receives gradient records on many connections, straight into the memory of gradient slots.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "storage/os_io.hpp"
#include "wire/receiver_hub.hpp"
#include "wire/windows.hpp"

namespace lastgood {

struct ReceiverCounters {
    std::uint64_t records = 0;        // gradients that were held
    std::uint64_t bytes = 0;          // of their payloads
    std::uint64_t read_bytes = 0;     // of all that came, behind what followed from it
    std::uint64_t drained_bytes = 0;  // of payloads that were refused
    std::uint64_t ends = 0;
    std::uint64_t connections = 0;  // now open
    std::uint64_t parked = 0;       // now not read, for the window or for the queue of events
    double checksum_s = 0.0;        // over all threads
};

class Receiver {
  public:
    // Starts the threads. The memory at `slots` must live as long as this object, and for ever where `shut_down` says so.
    Receiver(std::uint64_t job, std::uint32_t epoch, const std::vector<DeclaredBucket>& buckets,
             const std::vector<std::vector<std::uintptr_t>>& slots, const ReceiverOptions& options);
    ~Receiver();
    Receiver(const Receiver&) = delete;
    Receiver& operator=(const Receiver&) = delete;

    // Reads records from a connection on from here. `fd` is duplicated. Returns the connection's number.
    std::uint64_t add(int fd, std::uint32_t rank);

    // As in Windows; connections that waited go on.
    void advance(std::uint64_t first);
    bool set_first(std::uint32_t bucket, std::uint64_t first);
    void reset(std::uint32_t bucket);
    // Also closes all connections and forgets events of before, but for those that tell of a closed connection.
    void begin(std::uint32_t epoch, bool keep);
    const Windows& windows() const;

    // Takes up to `most` events, oldest first; none if there are none before the deadline.
    std::vector<ReceiverEvent> poll(std::size_t most, Clock::time_point deadline, const Tick& tick);

    ReceiverCounters counters() const;
    std::map<std::string, std::uint64_t> refused() const;

    // Closes all connections and ends the threads; false if they have not ended before the deadline.
    bool close(Clock::time_point deadline);
    // Whether this is a copy that a fork made, without the threads.
    bool forked() const;

  protected:
    // What the destructor does; for a derived class that must do it before its own end. False: a thread has not ended
    // in time (nothing that it does waits, so it is not given a CPU, or waits for a page), and is left to itself. It
    // shares the ownership of all that it uses but the slots, which it may still write into.
    bool shut_down();

  private:
    struct State;

    std::shared_ptr<State> state_;
    pid_t owner_;
};

}  // namespace lastgood

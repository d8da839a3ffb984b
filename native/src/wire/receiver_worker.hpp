// One thread of a receiver, and the connections that it reads.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "storage/os_io.hpp"
#include "wire/descriptor.hpp"
#include "wire/receiver_hub.hpp"
#include "wire/record.hpp"
#include "wire/windows.hpp"

namespace lastgood {

struct Connection {
    enum class Mode { header, receiving, draining };

    Connection(int fd, std::uint64_t number, std::uint32_t rank, std::uint64_t life)
        : descriptor(duplicate(fd), "Receiver: a connection's descriptor"), number(number), rank(rank), life(life) {}

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

// One thread's connections. Only its own thread uses what is not in the inbox.
class ReceiverWorker {
  public:
    explicit ReceiverWorker(ReceiverHub& hub);
    // From any thread: reads this connection from here on; wakes the thread.
    void give(std::unique_ptr<Connection> connection);
    void ring() { bell_.ring(); }
    // The thread itself, until the hub says stop.
    void run();

  private:
    // Something may have changed for every connection that waits; new ones may have come, and older lives ended.
    void answer_bell();
    void watch(Connection& connection);
    void unwatch(Connection& connection);
    void park(Connection& connection);
    void unpark(Connection& connection);
    void serve(Connection& connection);

    // Reads on until there is nothing to read, it must wait, or others have had to wait long enough. Returns the bytes.
    std::uint64_t read_turn(Connection& connection);

    // Puts what has happened into the queue. False where it must wait for room.
    bool deliver(Connection& connection);

    ReceiverEvent& tell(Connection& connection, ReceiverEvent::Kind kind);

    // A header has arrived. False where the connection waits for its window, or is read no more.
    bool begin_record(Connection& connection);

    // One read: a piece of the payload where it belongs, and behind its last piece the next header. Returns the bytes,
    // or -1 where the connection has no more for now.
    std::int64_t read_some(Connection& connection);

    // The window has moved past a record while its payload came.
    void lose_slot(Connection& connection);

    void end_record(Connection& connection);

    // Ends a connection; its event goes out as soon as the queue has room. Returns false: nothing is read any more.
    bool finish(Connection& connection, Cause cause, int number);

    void abandon(Connection& connection);
    void end_stalled();
    void forget_ended();

    ReceiverHub& hub_;
    const Descriptor epoll_;
    Bell bell_;
    std::vector<unsigned char> drained_;
    std::vector<std::unique_ptr<Connection>> connections_;
    std::mutex inbox_mutex_;
    std::vector<std::unique_ptr<Connection>> inbox_;
};

}  // namespace lastgood

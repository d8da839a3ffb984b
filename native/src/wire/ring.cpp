#include "wire/ring.hpp"

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <stdexcept>
#include <utility>

#include "storage/crc32c.hpp"
#include "wire/half.hpp"

namespace lastgood {

// A part of a chunk that lies in one range: the payload of one record.
struct Ring::Piece {
    std::uint64_t at;  // byte of the buffer
    std::uint32_t nbytes;
    std::uint32_t bucket;
    std::uint64_t offset;
};

// What goes out and what comes in, each in its order. A send is ready once as many pieces have been received as it
// needs: the piece itself at the step before, and so all before it.
struct Ring::Exchange {
    struct Entry {
        const Piece* piece;  // nullptr: the end of an iteration
        const RingStep* step;
        std::size_t needs;
        bool completes;  // of what is received: with this rank's own part the sum is whole
    };

    std::uint8_t dtype = 1;
    Divide divide = Divide::no;
    std::uint64_t iteration = 0;
    unsigned char* buffer = nullptr;
    std::vector<std::vector<Piece>> chunks;
    std::vector<Entry> sends;
    std::vector<Entry> receives;

    std::size_t sent = 0;      // whole entries
    std::size_t received = 0;  // whole entries
    Header out{};
    bool out_packed = false;
    std::size_t out_done = 0;  // bytes of the entry that is under way, its header included
    Header in{};
    std::size_t in_done = 0;
    Clock::time_point deadline;
};

namespace {

template <class Number>
void add_numbers(void* target, const void* source, std::size_t elements) {
    auto* to = static_cast<Number*>(target);
    const auto* from = static_cast<const Number*>(source);
    for (std::size_t index = 0; index < elements; ++index) to[index] = from[index] + to[index];
}

template <class Number>
void divide_numbers(void* target, std::size_t elements, std::uint32_t divisor) {
    auto* to = static_cast<Number*>(target);
    const auto by = Number(divisor);
    for (std::size_t index = 0; index < elements; ++index) to[index] = to[index] / by;
}

[[noreturn]] void unknown_dtype(std::uint8_t dtype) {
    throw std::invalid_argument("ring: no element type has the number " + std::to_string(dtype));
}

std::string describe(const Record& record) {
    if (record.kind == RecordKind::end) return "the end of iteration " + std::to_string(record.iteration);
    const std::string where =
        record.bucket == kNoBucket ? "bytes of no bucket" : "bucket " + std::to_string(record.bucket);
    return where + ", byte " + std::to_string(record.offset) + ", " + std::to_string(record.length) +
           " bytes of type " + std::to_string(record.dtype) + " of iteration " + std::to_string(record.iteration);
}

[[noreturn]] void closed(const std::string& operation) {
    throw OsError(ECONNRESET, operation + ", which closed the connection (its own log says why)", 0, 0);
}

bool same(const Record& one, const Record& other) {
    return one.kind == other.kind && one.flags == other.flags && one.job == other.job && one.epoch == other.epoch &&
           one.rank == other.rank && one.iteration == other.iteration && one.bucket == other.bucket &&
           one.dtype == other.dtype && one.offset == other.offset && one.length == other.length;
}

}  // namespace

void add_elements(std::uint8_t dtype, void* target, const void* source, std::size_t elements) {
    switch (dtype) {
        case 1:
            return add_numbers<float>(target, source, elements);
        case 2:
            return add_numbers<double>(target, source, elements);
        case 3:
            return add_float16(static_cast<std::uint16_t*>(target), static_cast<const std::uint16_t*>(source), elements);
        case 4:
            return add_bfloat16(static_cast<std::uint16_t*>(target), static_cast<const std::uint16_t*>(source),
                                elements);
        default:
            unknown_dtype(dtype);
    }
}

void divide_elements(std::uint8_t dtype, void* target, std::size_t elements, std::uint32_t divisor) {
    switch (dtype) {
        case 1:
            return divide_numbers<float>(target, elements, divisor);
        case 2:
            return divide_numbers<double>(target, elements, divisor);
        case 3:
            return divide_float16(static_cast<std::uint16_t*>(target), elements, float(divisor));
        case 4:
            return divide_bfloat16(static_cast<std::uint16_t*>(target), elements, float(divisor));
        default:
            unknown_dtype(dtype);
    }
}

Ring::Ring(int previous_fd, int next_fd, std::uint64_t job, std::uint32_t epoch, std::uint32_t rank,
           std::uint32_t ranks, std::string previous_name, std::string next_name, double timeout_s)
    : previous_(previous_fd),
      next_(next_fd),
      job_(job),
      epoch_(epoch),
      rank_(rank),
      ranks_(ranks),
      previous_name_(std::move(previous_name)),
      next_name_(std::move(next_name)),
      timeout_s_(timeout_s) {
    if (ranks < 2 || rank >= ranks) throw std::invalid_argument("ring: a rank of a ring of 2 ranks or more is needed");
}

void Ring::all_reduce(const RingPlan& plan, std::uintptr_t address, std::uint64_t iteration, const Tick& tick) {
    const std::uint64_t item = item_bytes(plan.dtype);
    if (item == 0) unknown_dtype(plan.dtype);
    if (plan.segment_bytes == 0 || plan.segment_bytes % 16 != 0 || plan.segment_bytes > kMaxPayloadBytes)
        throw std::invalid_argument("ring: a segment is a multiple of 16 bytes, up to the longest record");
    const std::size_t steps = 2 * std::size_t(ranks_) - 2;
    if (plan.own.size() != steps || plan.previous.size() != steps || plan.chunk_bytes.size() % ranks_ != 0)
        throw std::invalid_argument("ring: steps and chunks are not those of this number of ranks");
    if (!plan.previous.back().final) throw std::invalid_argument("ring: what is received last is a whole sum");
    for (std::size_t step = 0; step < steps; ++step)
        if (plan.own[step].chunk >= ranks_ || plan.previous[step].chunk >= ranks_ ||
            (step + 1 < steps && plan.own[step + 1].chunk != plan.previous[step].chunk))
            throw std::invalid_argument("ring: a rank sends at each step what it received at the step before");

    Exchange exchange;
    exchange.dtype = plan.dtype;
    exchange.divide = plan.divide;
    exchange.iteration = iteration;
    exchange.buffer = reinterpret_cast<unsigned char*>(address);
    // Pieces: chunks cut at the borders of ranges, and to segments.
    exchange.chunks.reserve(plan.chunk_bytes.size());
    std::size_t range = 0;
    std::uint64_t in_range = 0;  // bytes of the range that are given out
    std::uint64_t at = 0;
    for (const std::uint64_t nbytes : plan.chunk_bytes) {
        std::vector<Piece>& pieces = exchange.chunks.emplace_back();
        for (std::uint64_t left = nbytes; left > 0;) {
            while (range < plan.ranges.size() && in_range == plan.ranges[range].nbytes) ++range, in_range = 0;
            if (range == plan.ranges.size()) throw std::invalid_argument("ring: the ranges are shorter than the chunks");
            const RingRange& from = plan.ranges[range];
            const std::uint64_t length = std::min({left, from.nbytes - in_range, plan.segment_bytes});
            if (length % item != 0) throw std::invalid_argument("ring: a range or a chunk that cuts an element");
            pieces.push_back({at, std::uint32_t(length), from.bucket, from.offset + in_range});
            at += length, in_range += length, left -= length;
        }
    }
    if (range < plan.ranges.size() && (range + 1 < plan.ranges.size() || in_range < plan.ranges[range].nbytes))
        throw std::invalid_argument("ring: the ranges are longer than the chunks");

    for (std::size_t loop = 0; loop < exchange.chunks.size(); loop += ranks_) {
        // Within a loop the pieces that are received at a step are those that are sent at the next one, in that order.
        std::size_t needs = exchange.receives.size();
        for (std::size_t step = 0; step < steps; ++step) {
            for (const Piece& piece : exchange.chunks[loop + plan.own[step].chunk])
                exchange.sends.push_back({&piece, &plan.own[step], step == 0 ? 0 : ++needs, false});
            const bool completes = !plan.previous[step].final && plan.own[step + 1].final;
            for (const Piece& piece : exchange.chunks[loop + plan.previous[step].chunk])
                exchange.receives.push_back({&piece, &plan.previous[step], 0, completes});
        }
    }
    if (plan.divide == Divide::before) divide_elements(plan.dtype, exchange.buffer, at / item, ranks_);
    run(exchange, tick);
}

void Ring::end(std::uint64_t iteration, const Tick& tick) {
    Exchange exchange;
    exchange.iteration = iteration;
    exchange.sends.push_back({nullptr, nullptr, 0, false});
    exchange.receives.push_back({nullptr, nullptr, 0, false});
    run(exchange, tick);
}

void Ring::shut_down() {
    broken_.store(true);
    ::shutdown(previous_.get(), SHUT_RDWR);
    ::shutdown(next_.get(), SHUT_RDWR);
}

void Ring::run(Exchange& exchange, const Tick& tick) {
    if (broken_.load())
        throw OsError(ENOTCONN, "ring: it was closed, or a call on it failed before; all-reduce", 0, 0);
    try {
        exchange.deadline = deadline_after(timeout_s_);
        while (exchange.sent < exchange.sends.size() || exchange.received < exchange.receives.size()) {
            const bool out = send_some(exchange);
            const bool in = receive_some(exchange);
            if (out || in)
                exchange.deadline = deadline_after(timeout_s_);
            else
                wait(exchange, tick);
        }
    } catch (...) {
        shut_down();
        throw;
    }
}

Record Ring::record_of(const Exchange& exchange, const Piece& piece, std::uint32_t rank, bool marked) const {
    Record record;
    record.kind = RecordKind::gradient;
    // Bytes of no bucket are of no use to anyone but the ring.
    record.flags = marked && piece.bucket != kNoBucket ? kFinal : 0;
    record.job = job_;
    record.epoch = epoch_;
    record.rank = rank;
    record.iteration = exchange.iteration;
    record.bucket = piece.bucket;
    record.dtype = exchange.dtype;
    record.offset = piece.offset;
    record.length = piece.nbytes;
    return record;
}

// Sends as much of one record as the kernel takes. Returns whether anything went out.
bool Ring::send_some(Exchange& exchange) {
    if (exchange.sent == exchange.sends.size()) return false;
    const Exchange::Entry& entry = exchange.sends[exchange.sent];
    if (entry.needs > exchange.received) return false;
    const std::size_t payload = entry.piece ? entry.piece->nbytes : 0;
    unsigned char* const bytes = entry.piece ? exchange.buffer + entry.piece->at : nullptr;
    if (!exchange.out_packed) {
        Record record;
        if (entry.piece) {
            record = record_of(exchange, *entry.piece, rank_, entry.step->marked);
            record.checksum = crc32c(bytes, payload, 0);
        } else {
            record.kind = RecordKind::end;
            record.job = job_, record.epoch = epoch_, record.rank = rank_, record.iteration = exchange.iteration;
        }
        pack_header(record, exchange.out);
        exchange.out_packed = true;
    }
    const std::size_t of_header = std::min(exchange.out_done, kHeaderBytes);
    const std::size_t of_payload = exchange.out_done - of_header;
    iovec parts[2] = {{exchange.out.data() + of_header, kHeaderBytes - of_header},
                      {bytes + of_payload, payload - of_payload}};
    msghdr message{};
    message.msg_iov = parts[0].iov_len != 0 ? parts : parts + 1;
    message.msg_iovlen = parts[0].iov_len != 0 ? 2 : 1;
    const ssize_t count = ::sendmsg(next_.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (count < 0) {
        if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return false;
        if (errno == EPIPE || errno == ECONNRESET) closed("sending to " + next_name_);
        throw OsError(errno, "sending to " + next_name_, exchange.out_done, kHeaderBytes + payload);
    }
    exchange.out_done += std::size_t(count);
    sent_bytes_.fetch_add(std::uint64_t(count));
    if (exchange.out_done == kHeaderBytes + payload) {
        if (entry.piece && entry.step->marked && entry.piece->bucket != kNoBucket) marked_bytes_.fetch_add(payload);
        sent_records_.fetch_add(1);
        exchange.out_done = 0;
        exchange.out_packed = false;
        ++exchange.sent;
    }
    return true;
}

// Receives as much of one record as is there. Returns whether anything came in.
bool Ring::receive_some(Exchange& exchange) {
    if (exchange.received == exchange.receives.size()) return false;
    const Exchange::Entry& entry = exchange.receives[exchange.received];
    const std::size_t payload = entry.piece ? entry.piece->nbytes : 0;
    // Partial sums are added to this rank's own part once their checksum holds; whole ones go straight into place.
    const bool adds = entry.piece && !entry.step->final;
    if (adds && staging_.size() < payload) staging_.resize(payload);
    unsigned char* const target = !entry.piece ? nullptr : adds ? staging_.data() : exchange.buffer + entry.piece->at;
    const bool header = exchange.in_done < kHeaderBytes;
    const std::size_t before = header ? exchange.in_done : exchange.in_done - kHeaderBytes;
    unsigned char* const into = (header ? exchange.in.data() : target) + before;
    const std::size_t wanted = (header ? kHeaderBytes : payload) - before;
    const ssize_t count = ::recv(previous_.get(), into, wanted, MSG_DONTWAIT);
    if (count < 0) {
        if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return false;
        if (errno == ECONNRESET) closed("receiving from " + previous_name_);
        throw OsError(errno, "receiving from " + previous_name_, exchange.in_done, kHeaderBytes + payload);
    }
    if (count == 0) closed("receiving from " + previous_name_);
    exchange.in_done += std::size_t(count);
    if (header && exchange.in_done == kHeaderBytes) {
        Record expected;
        if (entry.piece) {
            expected = record_of(exchange, *entry.piece, (rank_ + ranks_ - 1) % ranks_, entry.step->marked);
        } else {
            expected.kind = RecordKind::end;
            expected.job = job_, expected.epoch = epoch_, expected.iteration = exchange.iteration;
            expected.rank = (rank_ + ranks_ - 1) % ranks_;
        }
        Record found;
        const Cause cause = parse_header(exchange.in, found);
        if (cause != Cause::count)
            throw DamagedRecord(previous_name_ + " sent no record of a ring (" + cause_name(cause) + ") where " +
                                describe(expected) + " was expected");
        if (!same(found, expected))
            throw OutOfStep(previous_name_ + " sent " + describe(found) + " where " + describe(expected) +
                            " was expected: the ranks do not reduce the same tensors in the same order, or are not of "
                            "one job and epoch");
    }
    if (exchange.in_done == kHeaderBytes + payload) {
        if (entry.piece) {
            Record found;
            parse_header(exchange.in, found);
            if (crc32c(target, payload, 0) != found.checksum)
                throw DamagedRecord(previous_name_ + " sent a damaged payload: " + describe(found));
            if (adds) {
                unsigned char* const own = exchange.buffer + entry.piece->at;
                const std::size_t elements = payload / item_bytes(exchange.dtype);
                add_elements(exchange.dtype, own, target, elements);
                if (entry.completes && exchange.divide == Divide::after)
                    divide_elements(exchange.dtype, own, elements, ranks_);
            }
        }
        exchange.in_done = 0;
        ++exchange.received;
    }
    return true;
}

void Ring::wait(Exchange& exchange, const Tick& tick) {
    const bool sends_left = exchange.sent < exchange.sends.size();
    const bool ready = sends_left && exchange.sends[exchange.sent].needs <= exchange.received;
    const bool receives_left = exchange.received < exchange.receives.size();
    // The next rank may go once it has everything, and not before: it is watched until then.
    pollfd watched[2] = {
        {receives_left ? previous_.get() : -1, POLLIN, 0},
        {sends_left ? next_.get() : -1, short(POLLRDHUP | (ready ? POLLOUT : 0)), 0},
    };
    const int count = ::poll(watched, 2, int(kTickPeriod.count()));
    if (count < 0 && errno != EINTR) throw OsError(errno, "poll", 0, 0);
    if (count > 0) {
        if ((watched[1].revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0) closed("sending to " + next_name_);
        return;
    }
    tick();
    if (Clock::now() < exchange.deadline) return;
    char waited[64];
    std::snprintf(waited, sizeof waited, "waited %g s for ", timeout_s_);
    const std::string whose = ready ? next_name_ + " to take " : previous_name_ + " to send ";
    const Exchange::Entry& entry = ready ? exchange.sends[exchange.sent] : exchange.receives[exchange.received];
    Record record;
    record.kind = RecordKind::end;
    record.iteration = exchange.iteration;
    if (entry.piece) record = record_of(exchange, *entry.piece, rank_, false);
    throw WaitEnded(std::string(waited) + whose + describe(record));
}

}  // namespace lastgood

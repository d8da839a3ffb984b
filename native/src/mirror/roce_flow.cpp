#include "mirror/roce_flow.hpp"

#include <algorithm>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace lastgood::mirror {
namespace {

constexpr std::uint64_t kMostWaitingBytes = 16u << 20;
constexpr std::uint64_t kMostFlag = std::uint64_t(1) << 31;
constexpr std::uint64_t kMostSteps = 5;
constexpr std::int64_t kMostMissing = 4096;
constexpr std::size_t kLlLine = 16, kLl128Line = 128, kLl128Data = 120;

constexpr const char* kCountNames[] = {
    "frames",
    "short_frames",
    "unknown_links",
    "not_ip",
    "fragments",
    "damaged_headers",
    "other_traffic",
    "truncated_packets",
    "wrong_checksums",
    "strangers",
    "congestion_notices",
    "connection_datagrams",
    "writes",
    "acknowledgements",
    "negative_acknowledgements",
    "unpaired_acknowledgements",
    "repeated_packets",
    "late_packets",
    "held_packets",
    "holes_given_up",
    "reused_queue_pairs",
    "odd_packets",
    "lost_packets",
    "cut_messages",
    "wrong_flags",
    "immediates",
    "unplaced_packets",
    "clear_to_send",
    "packets_before_start",
    "flows",
    "messages",
    "payload_bytes",
    "lost_bytes",
    "lost_messages",
    "resynced",
};
static_assert(sizeof kCountNames / sizeof *kCountNames == std::size_t(RoceCount::end), "a name for each counter");

std::uint64_t load_little(const std::uint8_t* at, int nbytes) {
    std::uint64_t value = 0;
    for (int byte = 0; byte < nbytes; ++byte) value |= std::uint64_t(at[byte]) << (8 * byte);
    return value;
}

// The sizes that an immediate may mean, the smaller one first; equal ones once.
std::vector<std::uint64_t> stated_sizes(const std::uint8_t* immediate) {
    const std::uint64_t little = load_little(immediate, 4);
    std::uint64_t big = 0;
    for (int byte = 0; byte < 4; ++byte) big = big << 8 | immediate[byte];
    if (little == big) return {little};
    return {std::min(little, big), std::max(little, big)};
}

// Whether data and flags cannot be told apart.
bool is_constant(const std::uint8_t* at, std::size_t nbytes) {
    return nbytes % 4 == 0 && (nbytes < 8 || std::memcmp(at, at + 4, nbytes - 4) == 0);
}

std::uint64_t ceil_div(std::uint64_t value, std::uint64_t divisor) { return (value + divisor - 1) / divisor; }

}  // namespace

const char* roce_count_name(RoceCount which) { return kCountNames[std::size_t(which)]; }

// -- lines ------------------------------------------------------------------------------------------------------------

std::uint64_t data_bytes(Coding coding, std::uint64_t wire_bytes) {
    if (coding == Coding::ll) return wire_bytes / 2;
    if (coding == Coding::ll128) return wire_bytes / kLl128Line * kLl128Data;
    return wire_bytes;
}

std::uint64_t one_flag(Coding coding, const std::uint8_t* payload, std::size_t nbytes) {
    const std::size_t line = coding == Coding::ll128 ? kLl128Line : kLlLine;
    if (nbytes == 0 || nbytes % line != 0) return 0;
    const std::uint64_t flag =
        coding == Coding::ll128 ? load_little(payload + kLl128Data, 8) : load_little(payload + 4, 4);
    return all_flags(coding, payload, nbytes, flag) ? flag : 0;
}

bool all_flags(Coding coding, const std::uint8_t* payload, std::size_t nbytes, std::uint64_t flag) {
    const std::size_t line = coding == Coding::ll128 ? kLl128Line : kLlLine;
    if (nbytes == 0 || nbytes % line != 0) return false;
    if (coding == Coding::ll128) {
        for (std::size_t at = 0; at < nbytes; at += line)
            if (load_little(payload + at + kLl128Data, 8) != flag) return false;
        return true;
    }
    std::size_t at = 0;
#if defined(__x86_64__)
    const __m128i wanted = _mm_set1_epi64x(static_cast<long long>(flag << 32));
    const __m128i places = _mm_set1_epi64x(static_cast<long long>(0xFFFFFFFF00000000ull));
    __m128i differing = _mm_setzero_si128();
    for (; at < nbytes; at += kLlLine) {
        const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(payload + at));
        differing = _mm_or_si128(differing, _mm_xor_si128(_mm_and_si128(words, places), wanted));
    }
    return _mm_movemask_epi8(_mm_cmpeq_epi32(differing, _mm_setzero_si128())) == 0xFFFF;
#else
    for (; at < nbytes; at += kLlLine)
        if (load_little(payload + at + 4, 4) != flag || load_little(payload + at + 12, 4) != flag) return false;
    return true;
#endif
}

void decode_lines(Coding coding, const std::uint8_t* payload, std::size_t nbytes, std::uint8_t* data) {
    if (coding == Coding::ll128) {
        for (std::size_t at = 0; at + kLl128Line <= nbytes; at += kLl128Line, data += kLl128Data)
            std::memcpy(data, payload + at, kLl128Data);
        return;
    }
    std::size_t at = 0;
#if defined(__x86_64__)
    for (; at + 2 * kLlLine <= nbytes; at += 2 * kLlLine, data += 16) {
        const __m128 first = _mm_castsi128_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(payload + at)));
        const __m128 second = _mm_castsi128_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(payload + at + 16)));
        const __m128i words = _mm_castps_si128(_mm_shuffle_ps(first, second, _MM_SHUFFLE(2, 0, 2, 0)));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(data), words);
    }
#endif
    for (; at + kLlLine <= nbytes; at += kLlLine, data += 8) {
        std::memcpy(data, payload + at, 4);
        std::memcpy(data + 4, payload + at + 8, 4);
    }
}

// -- packets ----------------------------------------------------------------------------------------------------------

RoceFlow::RoceFlow(RoceSink& sink, RoceProtocol protocol, bool from_start, bool striped)
    : sink_(sink), protocol_(protocol), from_start_(from_start), striped_(striped), has_gap_(!from_start), gap_(from_start ? 0 : -1) {}

void RoceFlow::take(const RoceWrite& write) {
    take_next(write);
    due_ = write.psn + 1;
}

void RoceFlow::take_next(const RoceWrite& write) {
    if (write.only_immediate()) {
        immediate(write);
        return;
    }
    immediate_due_ = false;
    if (!split_.empty()) {
        if (write.opcode == kOnly && continues_split(write)) {
            wait(split_, write);
            return;
        }
        end_split();
    }
    if (has_gap_ && !after_gap(write)) return;
    if (is_open_) {
        if (write.opcode == kMiddle || write.opcode == kLast || write.opcode == kLastImmediate) {
            go_on(write);
            return;
        }
        cut(write.psn);
    }
    if (write.opcode == kFirst || write.opcode == kOnlyImmediate) {
        begin(write);
    } else if (write.opcode == kOnly) {
        wait(split_, write);
    } else {
        sink_.count(RoceCount::odd_packets, 1);
        has_gap_ = true;
        gap_ = -1;
    }
}

void RoceFlow::lose(std::int64_t first, std::int64_t last) {
    due_ = last + 1;
    sink_.count(RoceCount::lost_packets, std::uint64_t(last - first + 1));
    if (has_gap_) {
        drop_tail();
        return;
    }
    if (!split_.empty()) {
        if (carries_data_) {
            split_gap_ += std::uint64_t(last - first + 1);
            return;
        }
        drop_split();
    }
    if (immediate_due_) {
        immediate_due_ = false;
        ++first;
    }
    if (is_open_) {
        const std::int64_t end_psn = first_ + std::int64_t(packets(size_)) - 1;
        const std::int64_t upto = std::min(last, end_psn);
        const std::uint64_t begin = std::uint64_t(first - first_) * mtu_;
        lost(begin, std::min(size_, std::uint64_t(upto - first_ + 1) * mtu_) - begin);
        if (upto == end_psn) end();
        first = upto + 1;
    }
    if (first <= last) {
        has_gap_ = true;
        gap_ = first;
    }
}

void RoceFlow::finish() {
    drop_tail();
    if (!split_.empty() && carries_data_) {
        split_unknown();
        lose_messages(1);
    }
    drop_split();
    if (is_open_) cut(due_);
}

// -- one message ------------------------------------------------------------------------------------------------------

void RoceFlow::begin(const RoceWrite& write) {
    carries_data_ = true;
    const std::uint64_t size = write.opcode == kFirst ? write.length : write.nbytes;
    if (write.length != size || (write.opcode == kFirst && !(0 < write.nbytes && write.nbytes < size))) {
        sink_.count(RoceCount::odd_packets, 1);
        has_gap_ = true;
        gap_ = -1;
        return;
    }
    if (write.opcode == kFirst) mtu_ = write.nbytes;
    open(size, write.psn, write);
    piece(0, write);
    if (write.opcode == kOnlyImmediate) end();
}

void RoceFlow::go_on(const RoceWrite& write) {
    const std::uint64_t offset = std::uint64_t(write.psn - first_) * mtu_;
    const bool past = offset > size_;
    const std::uint64_t rest = past ? 0 : size_ - offset;
    const bool fits = write.opcode == kMiddle ? write.nbytes == mtu_ && rest > write.nbytes : write.nbytes == rest;
    if (past || !fits) {
        sink_.count(RoceCount::odd_packets, 1);
        cut(write.psn);
        has_gap_ = true;
        gap_ = -1;
        return;
    }
    piece(offset, write);
    if (write.opcode != kMiddle) {
        end();
        immediate_due_ = write.opcode == kLast;
    }
}

void RoceFlow::open(std::uint64_t size, std::int64_t first, const RoceWrite& sample) {
    is_open_ = true;
    size_ = size;
    first_ = first;
    find_coding(size, sample);
    if (flag_ != 0) {
        last_flag_ = flag_;
        flag_message_ = message_;
        numbers_lost_ = false;
    }
    begun_ = true;
    sink_.head(message_, data_bytes(coding_, size), sample.time_ns);
}

void RoceFlow::end() {
    is_open_ = false;
    ++message_;
}

void RoceFlow::cut(std::int64_t psn) {
    sink_.count(RoceCount::cut_messages, 1);
    const std::uint64_t begin = std::min(size_, std::uint64_t(psn - first_) * mtu_);
    lost(begin, size_ - begin);
    end();
}

void RoceFlow::piece(std::uint64_t offset, const RoceWrite& write) {
    if (write.nbytes == 0) return;
    if (coding_ != Coding::raw && (flag_ == 0 || !all_flags(coding_, write.data, write.nbytes, flag_))) {
        sink_.count(RoceCount::wrong_flags, 1);
        lost(offset, write.nbytes);
        return;
    }
    sink_.piece(message_, data_bytes(coding_, offset), write, coding_);
}

void RoceFlow::lost(std::uint64_t offset, std::uint64_t nbytes) {
    const std::uint64_t begin = data_bytes(coding_, offset), end = data_bytes(coding_, offset + nbytes);
    if (end > begin) sink_.lost(message_, begin, end - begin);
}

std::uint64_t RoceFlow::packets(std::uint64_t size) const {
    return mtu_ == 0 ? 1 : std::max<std::uint64_t>(1, ceil_div(size, mtu_));
}

// -- adaptive routing -------------------------------------------------------------------------------------------------

void RoceFlow::immediate(const RoceWrite& write) {
    sink_.count(RoceCount::immediates, 1);
    adaptive_ = carries_data_ = true;
    immediate_due_ = false;
    if (!split_.empty()) {
        give_split(write);
    } else if (has_gap_) {
        if (!tail_.empty() && tail_.back().opcode == kLast)
            give_tail(write.immediate);
        else
            ends_in_gap(write);
    } else if (is_open_) {
        cut(write.psn);
    }
}

bool RoceFlow::continues_split(const RoceWrite& write) const {
    const RoceWrite& head = split_.front();
    const RoceWrite& last = split_.back();
    const std::uint64_t between = split_gap_ * head.nbytes;
    return write.address == last.address + last.nbytes + between && write.rkey == head.rkey &&
           write.nbytes <= head.nbytes && (between == 0 || last.nbytes == head.nbytes);
}

void RoceFlow::wait(std::vector<RoceWrite>& where, const RoceWrite& write) {
    const std::uint64_t more = write.nbytes + kPacketBytes;
    if (waiting_bytes_ + more > kMostWaitingBytes || !sink_.wait(std::int64_t(more))) {
        sink_.count(RoceCount::unplaced_packets, where.size() + 1);
        where.clear();
        release();
        split_gap_ = 0;
        has_gap_ = true;
        gap_ = -1;
        return;
    }
    waiting_bytes_ += more;
    where.push_back(write);
    RoceWrite& kept = where.back();
    if (!kept.own) {
        kept.own.reset(new std::uint8_t[kept.nbytes + 1]);
        if (kept.nbytes) std::memcpy(kept.own.get(), write.data, kept.nbytes);
        kept.data = kept.own.get();
    }
    if (&where == &split_) split_gap_ = 0;
}

void RoceFlow::release() {
    sink_.wait(-std::int64_t(waiting_bytes_));
    waiting_bytes_ = 0;
}

void RoceFlow::end_split() {
    if (!carries_data_ || split_gap_ == 0) {
        drop_split();
    } else if (split_gap_ == 1) {
        const RoceWrite& last = split_.back();
        split_message(last.address + last.nbytes - split_.front().address);
    } else {
        split_unknown();
    }
}

void RoceFlow::split_unknown() {
    has_gap_ = true;
    gap_ = split_.front().psn;
    sink_.count(RoceCount::unplaced_packets, split_.size());
    split_.clear();
    release();
    split_gap_ = 0;
}

void RoceFlow::drop_split() {
    sink_.count(RoceCount::clear_to_send, split_.size());
    split_.clear();
    release();
    split_gap_ = 0;
}

void RoceFlow::give_split(const RoceWrite& write) {
    const RoceWrite& head = split_.front();
    const RoceWrite& last = split_.back();
    std::uint64_t size = last.address + last.nbytes - head.address;
    if (split_gap_ != 0) {
        const std::uint64_t mtu = head.nbytes;
        std::vector<std::uint64_t> sizes;
        for (const std::uint64_t stated : stated(write.immediate))
            if (size + (split_gap_ - 1) * mtu < stated && stated <= size + split_gap_ * mtu && last.nbytes == mtu)
                sizes.push_back(stated);
        if (sizes.size() != 1) {
            split_unknown();
            ends_in_gap(write);
            return;
        }
        size = sizes.front();
    }
    split_message(size);
}

void RoceFlow::split_message(std::uint64_t size) {
    std::vector<RoceWrite> parts;
    parts.swap(split_);
    const RoceWrite& head = parts.front();
    if (size > head.nbytes) mtu_ = head.nbytes;
    open(size, head.psn, head);
    std::uint64_t at = 0;
    for (const RoceWrite& write : parts) {
        const std::uint64_t offset = write.address - head.address;
        if (offset > at) lost(at, offset - at);
        piece(offset, write);
        at = offset + write.nbytes;
    }
    lost(at, size - at);
    end();
    release();
    split_gap_ = 0;
}

// -- after a gap ------------------------------------------------------------------------------------------------------

bool RoceFlow::after_gap(const RoceWrite& write) {
    if (write.opcode == kMiddle || write.opcode == kLast || write.opcode == kLastImmediate) {
        if (!tail_.empty() && tail_.back().opcode == kLast) drop_tail();
        wait(tail_, write);
        if (write.opcode == kLastImmediate && !tail_.empty()) give_tail(write.immediate);
        return false;
    }
    drop_tail();
    count_missing(write.psn, &write);
    has_gap_ = false;
    return true;
}

void RoceFlow::drop_tail() {
    sink_.count(RoceCount::unplaced_packets, tail_.size());
    tail_.clear();
    release();
}

void RoceFlow::ends_in_gap(const RoceWrite& write) {
    drop_tail();
    bool exact = false;
    if (gap_ >= 0 && mtu_ != 0) {
        for (const std::uint64_t size : stated(write.immediate))
            exact |= std::int64_t(packets(size)) == write.psn - gap_;
    }
    if (exact)
        lose_messages(1);
    else
        unknown();
    has_gap_ = false;
}

void RoceFlow::give_tail(const std::uint8_t* immediate) {
    const RoceWrite& last = tail_.back();
    const std::int64_t end_psn = last.psn + 1;
    if (tail_.size() > 1) mtu_ = tail_.front().nbytes;
    const std::int64_t most = end_psn - std::max<std::int64_t>(gap_, 0);
    std::vector<std::uint64_t> sizes;
    for (const std::uint64_t size : stated(immediate)) {
        const std::uint64_t count = packets(size);
        if (mtu_ != 0 && size == (count - 1) * mtu_ + last.nbytes && 1 < count && std::int64_t(count) <= most)
            sizes.push_back(size);
    }
    bool even = true;
    for (std::size_t number = 0; number + 1 < tail_.size(); ++number) even &= tail_[number].nbytes == mtu_;
    if (sizes.size() != 1 || !even) {
        drop_tail();
        return;
    }
    const std::uint64_t size = sizes.front();
    const std::int64_t first = end_psn - std::int64_t(packets(size));
    if (first > tail_.front().psn) {
        drop_tail();
        return;
    }
    std::vector<RoceWrite> tail;
    tail.swap(tail_);
    release();
    carries_data_ = true;
    if (!begun_ && gap_ == -1) {
        sink_.count(RoceCount::packets_before_start, tail.size());
        has_gap_ = false;
        return;
    }
    count_missing(first, nullptr);
    has_gap_ = false;
    open(size, first, tail.front());
    lost(0, std::uint64_t(tail.front().psn - first) * mtu_);
    for (const RoceWrite& write : tail) piece(std::uint64_t(write.psn - first) * mtu_, write);
    end();
}

void RoceFlow::count_missing(std::int64_t start, const RoceWrite* write) {
    if (gap_ < 0) {
        if (begun_) unknown();
        return;
    }
    const std::int64_t missing_packets = start - gap_;
    if (missing_packets == 0) return;
    if (missing_packets == 1 && !adaptive_) {
        lose_messages(1);
        return;
    }
    const bool counted = !numbers_lost_ && (last_flag_ != 0 || from_start_);
    if (protocol_ == RoceProtocol::ll && counted && !striped_ && write != nullptr && write->nbytes != 0) {
        const std::uint64_t flag = one_flag(Coding::ll, write->data, write->nbytes);
        // The first message of a connection has flag 1.
        const std::uint64_t last_flag = last_flag_ != 0 ? last_flag_ : 1;
        const std::int64_t missing = std::int64_t(flag_message_ + flag - last_flag - message_);
        if (flag != 0 && 1 <= missing && missing <= std::min(missing_packets, kMostMissing)) {
            lose_messages(std::uint64_t(missing));
            return;
        }
    }
    unknown();
}

std::vector<std::uint64_t> RoceFlow::stated(const std::uint8_t* immediate) const {
    return striped_ ? std::vector<std::uint64_t>() : stated_sizes(immediate);
}

void RoceFlow::lose_messages(std::uint64_t count) {
    for (; count > 0; --count) {
        sink_.lost(message_, 0, 0);
        ++message_;
    }
}

void RoceFlow::unknown() {
    begun_ = numbers_lost_ = true;
    sink_.resynced("packets are missing, and how many messages they were is not certain");
}

// -- LL ---------------------------------------------------------------------------------------------------------------

void RoceFlow::find_coding(std::uint64_t size, const RoceWrite& sample) {
    coding_ = Coding::raw;
    flag_ = 0;
    if (protocol_ == RoceProtocol::simple || size == 0) return;
    if (protocol_ == RoceProtocol::ll128) {
        coding_ = Coding::ll128;
        flag_ = one_flag(coding_, sample.data, sample.nbytes);
        return;
    }
    const std::uint64_t flag = one_flag(Coding::ll, sample.data, sample.nbytes);
    if (protocol_ == RoceProtocol::automatic) {
        if (size % kLlLine != 0 || flag == 0 || flag >= kMostFlag) return;
        bool likely;
        if (last_flag_ != 0) {
            const std::uint64_t since = message_ - flag_message_;
            likely = last_flag_ + since <= flag && (numbers_lost_ ? !is_constant(sample.data, sample.nbytes)
                                                                  : flag <= last_flag_ + kMostSteps * since);
        } else if (from_start_ && !numbers_lost_) {
            likely = message_ < flag && flag <= 1 + kMostSteps * message_;
        } else {
            likely = !is_constant(sample.data, sample.nbytes);
        }
        if (!likely) return;
    }
    coding_ = Coding::ll;
    flag_ = flag;
}

}  // namespace lastgood::mirror

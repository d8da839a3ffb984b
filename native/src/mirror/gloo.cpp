#include "mirror/gloo.hpp"

#include <algorithm>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <set>
#include <tuple>

namespace lastgood::mirror {
namespace {

constexpr std::size_t kHeaderBytes = 48, kHandshakeBytes = 8, kEnough = 24;
constexpr std::uint64_t kSendBuffer = 0, kData = 1, kReadyToSend = 2, kReadyToReceive = 3;
constexpr std::uint64_t kMostNbytes = std::uint64_t{1} << 48;
constexpr std::int64_t kNearTags = 1 << 16;
constexpr std::uint64_t kGapBytes = std::uint64_t{64} << 20;
constexpr std::size_t kMostSlots = 1024, kMostAnnounced = 4096;
constexpr int kMostGuesses = 2000;

std::uint64_t little64(const std::uint8_t* at) {
    std::uint64_t value = 0;
    for (int byte = 7; byte >= 0; --byte) value = value << 8 | at[byte];
    return value;
}

struct Header {
    std::uint64_t nbytes, opcode, slot, offset, length, roffset;

    static Header parse(const std::uint8_t* at) {
        return {little64(at),      little64(at + 8),  little64(at + 16),
                little64(at + 24), little64(at + 32), little64(at + 40)};
    }
    bool possible() const {
        if (length >= kMostNbytes) return false;
        if (opcode == kSendBuffer) return nbytes == kHeaderBytes + length;
        if (offset | roffset) return false;
        if (opcode == kData) return nbytes == kHeaderBytes + length;
        return (opcode == kReadyToSend || opcode == kReadyToReceive) && nbytes == kHeaderBytes;
    }
    std::uint64_t prefix() const { return slot >> 56; }
    std::int64_t tag() const { return static_cast<std::int64_t>(slot >> 24 & 0xFFFFFFFF); }
    bool collective() const { return prefix() >= 1 && prefix() <= 8; }
};

constexpr std::int64_t kNoTag = -1;

// Where, from `begin` on, the first header lies that fits in all its fields; `size` if none does.
std::size_t find_header(const std::uint8_t* content, std::size_t size, std::size_t begin, std::int64_t tag) {
    for (std::size_t at = begin; at + kHeaderBytes <= size; ++at) {
        const std::uint8_t opcode = content[at + 8];
        if (opcode < 1 || opcode > 3 || content[at + 9] || content[at + 47]) continue;
        const Header header = Header::parse(content + at);
        if (header.offset == 0 && header.roffset == 0 && header.possible() && header.collective() &&
            (tag == kNoTag || std::abs(header.tag() - tag) <= kNearTags))
            return at;
    }
    return size;
}

// -- what both sides have announced -----------------------------------------------------------------------------------

class Announced {
  public:
    void to_send(std::uint64_t slot, std::uint64_t nbytes) { push(at(slot).to_send, nbytes); }
    void to_receive(std::uint64_t slot, std::uint64_t nbytes) { push(at(slot).to_receive, nbytes); }
    void sent(std::uint64_t slot) {
        Slot& known = at(slot);
        if (!known.to_send.empty()) known.to_send.pop_front();
        if (!known.to_receive.empty()) known.to_receive.pop_front();
    }
    // The payload of the message that follows `ahead` others of the slot; nullptr if it was not announced.
    const std::uint64_t* next(std::uint64_t slot, std::size_t ahead) const {
        const auto found = slots_.find(slot);
        if (found == slots_.end()) return nullptr;
        const Slot& known = found->second;
        if (ahead < known.to_send.size()) return &known.to_send[ahead];
        if (ahead < known.to_receive.size()) return &known.to_receive[ahead];
        return nullptr;
    }
    std::vector<std::uint64_t> open_slots() const {
        std::vector<std::uint64_t> found;
        for (const auto& one : slots_)
            if (next(one.first, 0)) found.push_back(one.first);
        return found;
    }

  private:
    struct Slot {
        std::deque<std::uint64_t> to_send, to_receive;
    };
    static void push(std::deque<std::uint64_t>& announced, std::uint64_t nbytes) {
        if (announced.size() == kMostAnnounced) announced.pop_front();
        announced.push_back(nbytes);
    }
    Slot& at(std::uint64_t slot) {
        const auto found = slots_.find(slot);
        if (found != slots_.end()) return found->second;
        if (slots_.size() >= kMostSlots) {
            slots_.erase(order_.front());
            order_.pop_front();
        }
        order_.push_back(slot);
        return slots_[slot];
    }
    std::map<std::uint64_t, Slot> slots_;
    std::deque<std::uint64_t> order_;
};

// -- bytes between a lost header and the next one ---------------------------------------------------------------------

struct Guess {
    std::uint64_t begin, slot, payload;
};

class Gap {
  public:
    Gap(const char* why, bool explainable, bool silent) : why(why), explainable(explainable), silent(silent) {}

    void hole(std::uint64_t nbytes) {
        end += nbytes;
        run_.clear();
    }
    // Takes bytes; whether the next header is there, and where it begins.
    bool add(Bytes content, std::int64_t tag, std::uint64_t& found) {
        const std::vector<std::uint8_t> copy(content.data, content.data + content.size);
        chunks_.emplace_back(end, copy);
        end += content.size;
        kept_ += content.size;
        run_.insert(run_.end(), copy.begin(), copy.end());
        const std::size_t at = find_header(run_.data(), run_.size(), 0, tag);
        if (at != run_.size()) {
            found = end - run_.size() + at;
            return true;
        }
        if (run_.size() >= kHeaderBytes)
            run_.erase(run_.begin(), run_.end() - static_cast<std::ptrdiff_t>(kHeaderBytes - 1));
        if (kept_ > kGapBytes) explainable = false;
        if (!explainable) {
            chunks_.clear();
            chunks_.emplace_back(end - run_.size(), run_);
            kept_ = run_.size();
        }
        return false;
    }
    // Calls `take(position, bytes)` for what is known between two positions, until it returns false.
    template <typename Take>
    bool known(std::uint64_t begin, std::uint64_t stop, Take take) const {
        // Chunks are in order: those before `begin` are passed over.
        auto chunk = std::upper_bound(chunks_.begin(), chunks_.end(), begin,
                                      [](std::uint64_t at, const auto& one) { return at < one.first; });
        if (chunk != chunks_.begin()) --chunk;
        for (; chunk != chunks_.end() && chunk->first < stop; ++chunk) {
            const std::uint64_t low = std::max(begin, chunk->first);
            const std::uint64_t high = std::min<std::uint64_t>(stop, chunk->first + chunk->second.size());
            if (low < high && !take(low, Bytes{chunk->second.data() + (low - chunk->first),
                                               static_cast<std::size_t>(high - low)}))
                return false;
        }
        return true;
    }
    bool explain(std::uint64_t stop, const Announced& announced, std::vector<Guess>& explained) const;

    const char* why;
    bool explainable;
    const bool silent;
    std::uint64_t end = 0;

  private:
    bool agrees(std::uint64_t begin, std::uint64_t slot, std::uint64_t payload) const {
        std::uint8_t header[kHeaderBytes];
        const std::uint64_t fields[] = {kHeaderBytes + payload, kData, slot, 0, payload, 0};
        for (std::size_t place = 0; place < kHeaderBytes; ++place)
            header[place] = static_cast<std::uint8_t>(fields[place / 8] >> place % 8 * 8);
        return known(begin, begin + kHeaderBytes, [&](std::uint64_t at, Bytes content) {
            return std::memcmp(header + (at - begin), content.data, content.size) == 0;
        });
    }
    bool may_announce(std::uint64_t begin) const {
        return known(begin, begin + kHeaderBytes, [&](std::uint64_t at, Bytes content) {
            for (std::size_t number = 0; number < content.size; ++number) {
                const std::uint64_t place = at - begin + number;
                const std::uint8_t value = content.data[number];
                if (place == 0 ? value != kHeaderBytes : place == 8 ? value != 2 && value != 3 : false) return false;
                const bool zero = (place > 0 && place < 8) || (place > 8 && place < 16) ||
                                  (place >= 24 && place < 32) || place >= 40;
                if (zero && value) return false;
            }
            return true;
        });
    }
    bool has(const Guess& guess) const {
        const std::uint64_t begin = guess.begin + kHeaderBytes;
        return !known(begin, begin + guess.payload, [](std::uint64_t, Bytes) { return false; });
    }

    std::vector<std::pair<std::uint64_t, std::vector<std::uint8_t>>> chunks_;
    std::uint64_t kept_ = 0;
    std::vector<std::uint8_t> run_;
};

bool Gap::explain(std::uint64_t stop, const Announced& announced, std::vector<Guess>& explained) const {
    using Places = std::vector<std::tuple<std::uint64_t, std::uint64_t, std::int64_t>>;
    const std::vector<std::uint64_t> slots = announced.open_slots();
    std::set<Places> found;
    std::vector<std::pair<std::uint64_t, std::vector<Guess>>> open{{0, {}}};
    int guesses = 0;
    while (!open.empty()) {
        auto [at, messages] = std::move(open.back());
        open.pop_back();
        if (++guesses > kMostGuesses) return false;
        if (at == stop) {
            Places places;
            for (const Guess& one : messages)
                places.emplace_back(one.slot, one.payload, has(one) ? static_cast<std::int64_t>(one.begin) : -1);
            if (found.insert(places).second) explained = messages;
            if (found.size() > 1) return false;
            continue;
        }
        if (at + kHeaderBytes > stop) continue;
        if (may_announce(at)) open.emplace_back(at + kHeaderBytes, messages);
        for (const std::uint64_t slot : slots) {
            const auto ahead = std::count_if(messages.begin(), messages.end(),
                                             [slot](const Guess& one) { return one.slot == slot; });
            const std::uint64_t* payload = announced.next(slot, static_cast<std::size_t>(ahead));
            if (!payload || at + kHeaderBytes + *payload > stop || !agrees(at, slot, *payload)) continue;
            std::vector<Guess> more = messages;
            more.push_back({at, slot, *payload});
            open.emplace_back(at + kHeaderBytes + *payload, std::move(more));
        }
    }
    return !found.empty();
}

// -- readers ----------------------------------------------------------------------------------------------------------

// What the two readers of a connection know together.
struct Shared {
    std::array<Announced, 2> announced;  // by the side that sends
    std::int64_t tag = kNoTag;
};

class GlooReader : public Reader {
  public:
    GlooReader(Gather& gather, std::uint32_t flow, std::size_t side, std::shared_ptr<Shared> shared, bool first,
               std::size_t handshake)
        : gather_(gather), flow_(flow), side_(side), shared_(std::move(shared)), skip_(first ? handshake : 0) {
        if (!first) gap_ = std::make_unique<Gap>("the capture began here", false, true);
    }

    void data(Bytes content, std::uint64_t time_ns) override {
        while (content.size) {
            if (gap_) {
                fill_gap(content, time_ns);
                return;
            }
            std::size_t take;
            if (skip_) {
                take = std::min<std::uint64_t>(content.size, skip_);
                skip_ -= take;
            } else if (offset_ < payload_) {
                take = static_cast<std::size_t>(std::min<std::uint64_t>(content.size, payload_ - offset_));
                gather_.piece(flow_, number_, offset_, {content.data, take});
                offset_ += take;
            } else {
                time_ns_ = time_ns;
                take = std::min(content.size, kHeaderBytes - head_size_);
                std::memcpy(head_ + head_size_, content.data, take);
                head_size_ += take;
                if (head_size_ == kHeaderBytes) begin(Header::parse(head_));
            }
            content = content.from(take);
        }
    }

    void hole(std::uint64_t nbytes) override {
        if (gap_) {
            gap_->hole(nbytes);
            return;
        }
        if (head_size_ >= kEnough) begin_early();
        const std::uint64_t skipped = std::min(nbytes, skip_);
        skip_ -= skipped;
        nbytes -= skipped;
        if (offset_ < payload_ && nbytes) {
            const std::uint64_t take = std::min(nbytes, payload_ - offset_);
            gather_.lost(flow_, number_, offset_, take);
            offset_ += take;
            nbytes -= take;
        }
        if (!nbytes) return;
        open_gap("a header was lost", true);
        gap_->hole(nbytes);
    }

    void end() override {
        if (ended_) return;
        ended_ = true;
        if (offset_ < payload_) {
            gather_.lost(flow_, number_, offset_, payload_ - offset_);
        } else if (gap_ && gap_->end > 1 && !gap_->silent) {
            gather_.resync(flow_, std::string(gap_->why) + ", and no other one followed");
        }
        gather_.close(flow_);
    }

  private:
    // -- headers

    void begin(const Header& header) {
        if (!header.possible()) {
            open_gap("bytes that are no header", false);
            return;
        }
        head_size_ = 0;
        number_ = next_number_++;
        payload_ = header.nbytes - kHeaderBytes;
        offset_ = 0;
        note(header);
        gather_.head({flow_, static_cast<std::uint32_t>(header.opcode), number_, header.slot, header.length, time_ns_});
    }

    void begin_early() {
        const std::uint64_t nbytes = little64(head_);
        const Header header{nbytes, little64(head_ + 8), little64(head_ + 16), 0, nbytes - kHeaderBytes, 0};
        const std::uint64_t* announced = shared_->announced[side_].next(header.slot, 0);
        if (header.opcode == kData && announced && *announced == header.length && header.possible()) {
            skip_ = kHeaderBytes - head_size_;
            begin(header);
        }
    }

    void note(const Header& header) {
        if (header.collective()) shared_->tag = header.tag();
        if (header.opcode == kReadyToSend) {
            shared_->announced[side_].to_send(header.slot, header.length);
        } else if (header.opcode == kReadyToReceive) {
            shared_->announced[1 - side_].to_receive(header.slot, header.length);
        } else {
            shared_->announced[side_].sent(header.slot);
        }
    }

    // -- gaps

    void open_gap(const char* why, bool explainable) {
        gap_ = std::make_unique<Gap>(why, explainable, false);
        if (head_size_) {
            std::uint64_t found;
            gap_->add({head_, head_size_}, shared_->tag, found);  // a header is not in less than one
            head_size_ = 0;
        }
    }

    void fill_gap(Bytes content, std::uint64_t time_ns) {
        std::uint64_t found;
        if (!gap_->add(content, shared_->tag, found)) return;
        const std::unique_ptr<Gap> gap = std::move(gap_);
        std::vector<Guess> messages;
        if (gap->explainable && gap->explain(found, shared_->announced[side_], messages)) {
            ++gather_.predicted_headers;
            for (const Guess& one : messages) predicted(*gap, one, time_ns);
        } else if (!gap->silent) {
            gather_.resync(flow_, std::string(gap->why) + ", and " + std::to_string(found) +
                                      " bytes before the next one are not explained");
        }
        ++next_number_;  // announcements that are lost have a number as well, together
        payload_ = offset_ = 0;
        gap->known(found, gap->end, [&](std::uint64_t, Bytes known) {
            data(gather_.keep({known.data, known.data + known.size}), time_ns);
            return true;
        });
    }

    void predicted(const Gap& gap, const Guess& message, std::uint64_t time_ns) {
        number_ = next_number_++;
        shared_->announced[side_].sent(message.slot);
        gather_.head({flow_, static_cast<std::uint32_t>(kData), number_, message.slot, message.payload, time_ns});
        const std::uint64_t begin = message.begin + kHeaderBytes;
        std::uint64_t at = begin;
        gap.known(begin, begin + message.payload, [&](std::uint64_t place, Bytes known) {
            if (at < place) gather_.lost(flow_, number_, at - begin, place - at);
            gather_.piece(flow_, number_, place - begin, gather_.keep({known.data, known.data + known.size}));
            at = place + known.size;
            return true;
        });
        if (at < begin + message.payload) gather_.lost(flow_, number_, at - begin, begin + message.payload - at);
    }

    Gather& gather_;
    const std::uint32_t flow_;
    const std::size_t side_;
    const std::shared_ptr<Shared> shared_;
    std::uint64_t skip_;
    std::uint8_t head_[kHeaderBytes];
    std::size_t head_size_ = 0;
    std::uint64_t number_ = 0, next_number_ = 0;
    std::uint64_t offset_ = 0, payload_ = 0;
    std::uint64_t time_ns_ = 0;
    std::unique_ptr<Gap> gap_;
    bool ended_ = false;
};

class GlooFraming : public Framing {
  public:
    Verdict judge(std::array<Beginning, 2>& beginnings) override {
        for (Beginning& one : beginnings) {
            if (one.first()) {
                const std::size_t at = one.opener == 1 ? kHandshakeBytes : 0;
                if (one.content.size() >= at + kHeaderBytes)
                    return Header::parse(one.content.data() + at).possible() ? Verdict::mine : Verdict::not_mine;
            } else {
                if (find_header(one.content.data(), one.content.size(), one.searched, kNoTag) != one.content.size())
                    return Verdict::mine;
                one.searched = one.content.size() >= kHeaderBytes ? one.content.size() - kHeaderBytes + 1 : 0;
            }
        }
        return Verdict::more;
    }

    std::array<std::unique_ptr<Reader>, 2> readers(const Connection& connection,
                                                   const std::array<Beginning, 2>& beginnings,
                                                   Gather& gather) override {
        const auto shared = std::make_shared<Shared>();
        std::array<std::unique_ptr<Reader>, 2> found;
        for (std::size_t side = 0; side < 2; ++side) {
            const Beginning& one = beginnings[side];
            const std::uint32_t flow = gather.open(connection, static_cast<int>(side), one.opener, one.first());
            found[side] = std::make_unique<GlooReader>(gather, flow, side, shared, one.first(),
                                                       one.opener == 1 ? kHandshakeBytes : 0);
        }
        return found;
    }
};

}  // namespace

std::unique_ptr<Framing> gloo_framing() {
    return std::make_unique<GlooFraming>();
}

}  // namespace lastgood::mirror

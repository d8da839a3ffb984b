#include "sparse/update.hpp"

#include <array>
#include <limits>
#include <stdexcept>

#include "optim/steps.hpp"
#include "sparse/update_lanes.hpp"
#include "wire/half_bits.hpp"

namespace lastgood {
namespace {

constexpr unsigned kWidth = 16;
constexpr std::uint64_t kNone = std::numeric_limits<std::uint64_t>::max();
constexpr std::size_t kBuckets = 256;
constexpr std::uint64_t kPartValues = 1 << 14;  // fewer are not worth a thread
constexpr unsigned kPartsOfThread = 4;
constexpr unsigned kMaximize = 1, kNesterovFlag = 2, kFirstFlag = 4;

alignas(64) constexpr float kZeros[kWidth] = {};

// Where a merge is in what one rank sent. `place` is kNone at the end, where `value` has zeros.
struct Head {
    const std::uint32_t* next = nullptr;
    const std::uint32_t* end = nullptr;
    const float* value = kZeros;
    std::uint64_t place = kNone;
};

struct Step {
    SparseTensor tensor;
    std::vector<SparseRow> rows;
    float scale = 1;
};

struct Part {
    std::uint64_t begin = 0;  // places
    std::uint64_t end = 0;
    std::vector<Head> heads;
};

// Places that some rank sent, in order, and their sums.
struct Merged {
    std::size_t count = 0;
    std::uint32_t place[kLanes];
    alignas(64) float sum[kLanes];
};

// At most `room` places. Sums start from zero, in the order of heads; a head that does not have the place adds zero.
template <unsigned Width, std::size_t Heads>
LASTGOOD_INLINE void merge_some(Head* given, std::size_t heads, std::size_t room, Merged& merged) {
    Head own[Heads != 0 ? Heads : 1];
    for (std::size_t h = 0; h < Heads; ++h) own[h] = given[h];
    Head* const all = Heads != 0 ? own : given;
    const std::size_t number = Heads != 0 ? Heads : heads;
    std::size_t count = 0;
    for (; count < room; ++count) {
        std::uint64_t least = kNone;
        for (std::size_t h = 0; h < number; ++h) least = all[h].place < least ? all[h].place : least;
        if (least == kNone) break;
        float sum[Width];
        for (unsigned i = 0; i < Width; ++i) sum[i] = 0.0f;
        for (std::size_t h = 0; h < number; ++h) {
            Head& head = all[h];
            const bool has = head.place == least;
            for (unsigned i = 0; i < Width; ++i) sum[i] += has ? head.value[i] : 0.0f;
            head.next += has;
            head.value += has ? Width : 0;
            if (head.next < head.end) {
                head.place = *head.next;
            } else {
                head.place = kNone;
                head.value = kZeros;
            }
        }
        merged.place[count] = std::uint32_t(least);
        std::memcpy(merged.sum + count * Width, sum, sizeof sum);
    }
    for (std::size_t h = 0; h < Heads; ++h) given[h] = own[h];
    merged.count = count;
}

template <unsigned Width>
LASTGOOD_INLINE void copy_some(Head& head, std::size_t room, Merged& merged) {
    const std::size_t count = std::min<std::size_t>(room, std::size_t(head.end - head.next));
    std::memcpy(merged.place, head.next, count * sizeof(std::uint32_t));
    for (std::size_t i = 0; i < count * Width; ++i) merged.sum[i] = 0.0f + head.value[i];
    head.next += count;
    head.value += count * Width;
    merged.count = count;
}

// Into the second-level cache: more such reads can be in progress than into the first, which halves the time of a step.
LASTGOOD_INLINE void into_cache(const void* address) { __builtin_prefetch(address, 0, 2); }

template <unsigned Width>
LASTGOOD_INLINE void next_places(const Step& step, std::vector<Head>& heads, Merged& merged) {
    constexpr std::size_t kRoom = kLanes / Width;
    switch (heads.size()) {
        case 1: copy_some<Width>(heads[0], kRoom, merged); break;
        case 4: merge_some<Width, 4>(heads.data(), 4, kRoom, merged); break;
        default: merge_some<Width, 0>(heads.data(), heads.size(), kRoom, merged);
    }
    const float scale = step.scale;
    for (std::size_t i = 0; i < merged.count * Width; ++i) merged.sum[i] *= scale;
    const SparseTensor& tensor = step.tensor;
    for (std::size_t i = 0; i < merged.count; ++i) {
        const std::size_t at = std::size_t(merged.place[i]) * Width;
        into_cache(tensor.parameter + at);
        if (tensor.first) into_cache(tensor.first + at);
        if (tensor.second) into_cache(tensor.second + at);
        if (tensor.touched) into_cache(tensor.touched + merged.place[i]);
    }
}

template <unsigned Width>
LASTGOOD_INLINE void gather(const std::uint32_t* places, std::size_t count, std::uint64_t elements, const float* from,
                            float* lanes) {
    if (from == nullptr) return;
    if (Width == 1) {
        for (std::size_t i = 0; i < count; ++i) {
            // One by one: some CPUs take longer for an instruction that gathers.
            const float* own = from;
            asm("" : "+r"(own));
            lanes[i] = own[places[i]];
        }
        return;
    }
    for (std::size_t i = 0; i < count; ++i) {
        const std::uint64_t at = std::uint64_t(places[i]) * Width;
        if (at + Width <= elements) {
            std::memcpy(lanes + i * Width, from + at, Width * sizeof(float));
            continue;
        }
        for (std::uint64_t k = 0; k < Width; ++k) lanes[i * Width + k] = at + k < elements ? from[at + k] : 0.0f;
    }
}

template <unsigned Width>
LASTGOOD_INLINE void scatter(const std::uint32_t* places, std::size_t count, std::uint64_t elements, const float* lanes,
                             float* to) {
    if (to == nullptr) return;
    if (Width == 1) {
        for (std::size_t i = 0; i < count; ++i) to[places[i]] = lanes[i];
        return;
    }
    for (std::size_t i = 0; i < count; ++i) {
        const std::uint64_t at = std::uint64_t(places[i]) * Width;
        const std::uint64_t inside = std::min<std::uint64_t>(Width, elements - at);
        if (inside == Width)
            std::memcpy(to + at, lanes + i * Width, Width * sizeof(float));
        else
            std::memcpy(to + at, lanes + i * Width, inside * sizeof(float));
    }
}

// Reorders places, and their sums, so that those of about as many rows made stand together. Whether any missed a row below
// `steps`.
template <unsigned Width>
LASTGOOD_INLINE bool sort_by_made(const Step& step, std::uint64_t steps, Merged& merged, Lanes& lanes) {
    const std::int32_t* touched = step.tensor.touched;
    const std::int32_t base = step.tensor.base;
    std::int32_t made[kLanes / Width], least = std::numeric_limits<std::int32_t>::max();
    for (std::size_t i = 0; i < merged.count; ++i) {
        // In bounds, whatever a counter says.
        const std::int32_t rows = std::int32_t(step.rows.size());
        made[i] = std::clamp(touched[merged.place[i]] - base, 0, rows);
        least = std::min(least, made[i]);
    }
    if (std::uint64_t(least) >= steps) return false;
    // Shifted until all are in a bucket.
    unsigned shift = 0;
    while ((steps >> shift) >= kBuckets) ++shift;
    std::uint16_t starts[kBuckets + 1] = {};
    for (std::size_t i = 0; i < merged.count; ++i) ++starts[(std::uint32_t(made[i]) >> shift) + 1];
    for (std::size_t i = 1; i <= kBuckets; ++i) starts[i] = std::uint16_t(starts[i] + starts[i - 1]);
    std::uint32_t places[kLanes / Width];
    for (std::size_t i = 0; i < merged.count; ++i) {
        const std::size_t at = starts[std::uint32_t(made[i]) >> shift]++;
        places[at] = merged.place[i];
        for (unsigned k = 0; k < Width; ++k) {
            lanes.made[at * Width + k] = made[i];
            lanes.gradient[at * Width + k] = merged.sum[i * Width + k];
        }
    }
    std::memcpy(merged.place, places, merged.count * sizeof(std::uint32_t));
    return true;
}

template <unsigned Width>
LASTGOOD_INLINE void load(const Step& step, const Merged& merged, Lanes& lanes) {
    const SparseTensor& tensor = step.tensor;
    gather<Width>(merged.place, merged.count, tensor.elements, tensor.parameter, lanes.parameter);
    gather<Width>(merged.place, merged.count, tensor.elements, tensor.first, lanes.first);
    gather<Width>(merged.place, merged.count, tensor.elements, tensor.second, lanes.second);
}

template <unsigned Width>
LASTGOOD_INLINE void store(const Step& step, const Merged& merged, const Lanes& lanes) {
    const SparseTensor& tensor = step.tensor;
    scatter<Width>(merged.place, merged.count, tensor.elements, lanes.parameter, tensor.parameter);
    scatter<Width>(merged.place, merged.count, tensor.elements, lanes.first, tensor.first);
    scatter<Width>(merged.place, merged.count, tensor.elements, lanes.second, tensor.second);
    if (tensor.touched == nullptr) return;
    const std::int32_t now = std::int32_t(tensor.base + std::int64_t(tensor.steps));
    for (std::size_t i = 0; i < merged.count; ++i) tensor.touched[merged.place[i]] = now;
}

// One step of complete blocks where they are.
struct StepOfBlocks {
    const SparseTensor& tensor;
    const SparseRow& row;
    const Merged& merged;
    std::size_t count;

    template <class Kind>
    LASTGOOD_INLINE void run() const {
        const SparseRow own = row;
        alignas(64) float none[kWidth] = {};
        for (std::size_t i = 0; i < count; ++i) {
            const std::size_t at = std::size_t(merged.place[i]) * kWidth;
            const float* const gradient = merged.sum + i * kWidth;
            float* const parameter = tensor.parameter + at;
            float* const first = Kind::kFirstMoment ? tensor.first + at : none;
            float* const second = Kind::kSecondMoment ? tensor.second + at : none;
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC ivdep
#endif
            for (unsigned k = 0; k < kWidth; ++k) {
                float p = parameter[k], m = first[k], v = second[k];
                Kind::make(own, gradient[k] * own.sign, p, m, v);
                parameter[k] = p;
                if (Kind::kFirstMoment) first[k] = m;
                if (Kind::kSecondMoment) second[k] = v;
            }
        }
    }
};

// Makes the step of complete blocks that missed nothing; leaves in `merged` what is left to do, a last block that is cut.
LASTGOOD_INLINE void apply_blocks(const Step& step, Merged& merged) {
    const SparseTensor& tensor = step.tensor;
    const std::uint64_t complete = tensor.elements / kWidth;
    const std::size_t count = merged.place[merged.count - 1] < complete ? merged.count : merged.count - 1;
    with_step(step.rows.back().kind, StepOfBlocks{tensor, step.rows.back(), merged, count});
    if (tensor.touched != nullptr) {
        const std::int32_t now = std::int32_t(tensor.base + std::int64_t(tensor.steps));
        for (std::size_t i = 0; i < count; ++i) tensor.touched[merged.place[i]] = now;
    }
    if (count != merged.count) {
        merged.place[0] = merged.place[count];
        std::memmove(merged.sum, merged.sum + count * kWidth, kWidth * sizeof(float));
    }
    merged.count -= count;
}

template <unsigned Width>
LASTGOOD_INLINE void apply_places(const Step& step, Merged& merged, Lanes& lanes) {
    const std::uint64_t missed = step.rows.size() - 1;
    const bool late = step.tensor.touched != nullptr && missed != 0 && merged.count != 0 &&
                      sort_by_made<Width>(step, missed, merged, lanes);
    if (Width == kWidth && !late) {
        apply_blocks(step, merged);
        if (merged.count == 0) return;
    }
    const std::size_t count = merged.count * Width;
    if (!late) std::memcpy(lanes.gradient, merged.sum, count * sizeof(float));
    load<Width>(step, merged, lanes);
    if (late) make_missed(lanes, count, step.rows.data(), missed);
    with_step(step.rows.back().kind, StepOfLanes{lanes, count, step.rows.back()});
    store<Width>(step, merged, lanes);
}

// While the places of one lot are worked on, those of the next ones are on their way into the cache: a lot of blocks has few.
template <unsigned Width>
LASTGOOD_INLINE void update_part(const Step& step, const Part& part) {
    constexpr unsigned kLots = Width == 1 ? 2 : 4;
    std::vector<Head> heads = part.heads;
    Merged lots[kLots];
    Lanes lanes;
    for (unsigned ahead = 0; ahead + 1 < kLots; ++ahead) next_places<Width>(step, heads, lots[ahead]);
    for (unsigned now = 0, next = kLots - 1; lots[now].count != 0; next = now, now = (now + 1) % kLots) {
        next_places<Width>(step, heads, lots[next]);
        apply_places<Width>(step, lots[now], lanes);
    }
}

template <unsigned Width>
LASTGOOD_INLINE void catch_up_part(const Step& step, const Part& part) {
    Merged lot;
    Lanes lanes;
    const SparseTensor& tensor = step.tensor;
    const std::uint64_t steps = step.rows.size();
    std::memset(lot.sum, 0, sizeof lot.sum);
    for (std::uint64_t place = part.begin; place < part.end;) {
        lot.count = 0;
        for (; place < part.end && lot.count < kLanes / Width; ++place)
            if (std::uint64_t(tensor.touched[place] - tensor.base) < steps) lot.place[lot.count++] = std::uint32_t(place);
        if (lot.count == 0) continue;
        sort_by_made<Width>(step, steps, lot, lanes);
        load<Width>(step, lot, lanes);
        make_missed(lanes, lot.count * Width, step.rows.data(), steps);
        store<Width>(step, lot, lanes);
    }
}

struct Update {
    static LASTGOOD_INLINE void over(const Step& step, const Part& part, std::uint64_t, std::uint64_t) {
        if (step.tensor.width == 1) return update_part<1>(step, part);
        return update_part<kWidth>(step, part);
    }
};

struct CatchUp {
    static LASTGOOD_INLINE void over(const Step& step, const Part& part, std::uint64_t, std::uint64_t) {
        if (step.tensor.width == 1) return catch_up_part<1>(step, part);
        return catch_up_part<kWidth>(step, part);
    }
};

[[noreturn]] void refuse(const std::string& why) { throw std::invalid_argument(why); }

SparseRow row_of(const SparseTensor& tensor, const double* given) {
    SparseRow row;
    const unsigned flags = unsigned(given[8]);
    row.sign = flags & kMaximize ? -1.0f : 1.0f;
    row.decay = float(given[0]);
    if (tensor.adam) {
        row.factor = float(given[1]);
        row.weight1 = float(given[2]);
        row.beta2 = float(given[3]);
        row.weight2 = float(given[4]);
        row.size = float(given[5]);
        row.correction = float(given[6]);
        row.eps = float(given[7]);
        row.kind = kAdam + (given[0] != 0 ? 1 : 0) + (row.weight1 < 0.5f ? 0 : 2);
        return row;
    }
    row.momentum = float(given[1]);
    row.undampened = float(given[2]);
    row.rate = float(given[3]);
    unsigned momentum = kNoMomentum;
    if (given[1] != 0) {
        const bool nesterov = flags & kNesterovFlag;
        momentum = flags & kFirstFlag ? (nesterov ? kFirstNesterov : kFirst) : (nesterov ? kNesterov : kMomentum);
        if (tensor.first == nullptr) refuse("a step with momentum of a tensor without a buffer");
    }
    row.kind = momentum + (given[0] != 0 ? kSgdMomenta : 0);
    // A negated zero may still turn the sign of another zero.
    if (row.kind == kNoMomentum && !(flags & kMaximize)) row.kind = kIdle;
    return row;
}

std::vector<SparseRow> rows_of(const SparseTensor& tensor) {
    std::vector<SparseRow> rows;
    rows.reserve(tensor.steps);
    for (std::uint64_t number = 0; number < tensor.steps; ++number)
        rows.push_back(row_of(tensor, tensor.rows + number * kRowNumbers));
    for (std::uint64_t number = tensor.steps; number-- > 0;) {
        const bool last = number + 1 == tensor.steps;
        rows[number].kind_end = !last && rows[number].kind == rows[number + 1].kind ? rows[number + 1].kind_end : number + 1;
        const double* own = tensor.rows + number * kRowNumbers;
        const bool alike = !last && std::equal(own, own + kRowNumbers, own + kRowNumbers);
        rows[number].alike_end = alike ? rows[number + 1].alike_end : number + 1;
    }
    return rows;
}

std::uint64_t places_of(const SparseTensor& tensor) { return (tensor.elements + tensor.width - 1) / tensor.width; }

Step checked(const SparseTensor& tensor, float scale) {
    if (tensor.width != 1 && tensor.width != kWidth) refuse("blocks of " + std::to_string(tensor.width) + " elements");
    if (tensor.elements == 0 || tensor.elements > (std::uint64_t(1) << 32))
        refuse("a tensor of " + std::to_string(tensor.elements) + " elements");
    if (tensor.steps == 0 || tensor.rows == nullptr) refuse("no step to make");
    if (tensor.base < 0 || tensor.steps > std::uint64_t(std::numeric_limits<std::int32_t>::max() - tensor.base))
        refuse("more steps than counters hold");
    if (tensor.parameter == nullptr || (tensor.adam && (tensor.first == nullptr || tensor.second == nullptr)))
        refuse("a tensor of a step lacks an address");
    return {tensor, rows_of(tensor), scale};
}

// Counters come from checkpoints.
void check_counters(const SparseTensor& tensor, std::uint64_t begin, std::uint64_t end) {
    const std::int32_t most = std::int32_t(tensor.base + std::int64_t(tensor.steps));
    std::int32_t low = tensor.base, high = tensor.base;
    for (std::uint64_t place = begin; place < end; ++place) {
        low = std::min(low, tensor.touched[place]);
        high = std::max(high, tensor.touched[place]);
    }
    if (low < tensor.base || high > most) refuse("a counter beyond the steps that are remembered");
}

// Sets `found` if a value is not finite.
struct NotFinite {
    static LASTGOOD_INLINE void over(const float* const& values, std::uint32_t* const& found, std::uint64_t begin,
                                     std::uint64_t end) {
        std::uint32_t any = 0;
        for (std::uint64_t i = begin; i < end; ++i) any |= (to_bits(values[i]) & 0x7F800000) == 0x7F800000;
        *found = any;
    }
};

// Sets `found` if an index is not above the one before it.
struct Descending {
    static LASTGOOD_INLINE void over(const std::uint32_t* const& indices, std::uint32_t* const& found, std::uint64_t begin,
                                     std::uint64_t end) {
        std::uint32_t any = 0;
        for (std::uint64_t i = begin; i < end; ++i) any |= indices[i] <= indices[i - 1];
        *found = any;
    }
};

template <class Check, class Value>
bool finds(const Value* values, std::uint64_t begin, std::uint64_t end, InstructionSet set) {
    std::uint32_t found = 0;
    step_runner<Check, const Value*, std::uint32_t*>(set)(values, &found, begin, end);
    return found != 0;
}

const char* fault(const SparseTensor& tensor, const SparseBlocks& blocks, const float* values, InstructionSet set) {
    if (blocks.count == 0) return nullptr;
    if (finds<Descending>(blocks.indices, 1, blocks.count, set)) return "indices do not ascend";
    const std::uint64_t last = blocks.indices[blocks.count - 1];
    if (last >= places_of(tensor)) return "an index beyond the end";
    if (finds<NotFinite>(values, 0, blocks.count * tensor.width, set)) return "values that are not finite";
    for (std::uint64_t at = last * tensor.width; at < (last + 1) * tensor.width; ++at)
        if (at >= tensor.elements && values[blocks.count * tensor.width - ((last + 1) * tensor.width - at)] != 0)
            return "values beyond the end";
    return nullptr;
}

std::vector<float> widened(const SparseBlocks& blocks, unsigned width) {
    std::vector<float> values;
    if (blocks.type == SparseValues::float32) return values;
    values.resize(blocks.count * width);
    const auto* from = static_cast<const std::uint16_t*>(blocks.values);
    if (blocks.type == SparseValues::bfloat16)
        for (std::size_t i = 0; i < values.size(); ++i) values[i] = from_bfloat16(from[i]);
    else
        for (std::size_t i = 0; i < values.size(); ++i) values[i] = from_float16(from[i]);
    return values;
}

Head head_of(const SparseBlocks& blocks, const float* values, unsigned width, std::uint64_t begin, std::uint64_t end) {
    Head head;
    const std::uint32_t* const all = blocks.indices + blocks.count;
    head.next = std::lower_bound(blocks.indices, all, begin);
    head.end = std::lower_bound(head.next, all, end);
    if (head.next == head.end) return head;
    head.value = values + std::size_t(head.next - blocks.indices) * width;
    head.place = *head.next;
    return head;
}

// Ranges of places with about as many of what the rank with most sent.
std::vector<Part> parts_of(const SparseTensor& tensor, const std::vector<SparseBlocks>& ranks,
                           const std::vector<const float*>& values, unsigned threads) {
    const auto largest = std::max_element(ranks.begin(), ranks.end(), [](const SparseBlocks& one, const SparseBlocks& other) {
        return one.count < other.count;
    });
    const std::uint64_t worth = largest->count * tensor.width / kPartValues;
    const std::uint64_t number = threads < 2 ? 1 : std::clamp<std::uint64_t>(worth, 1, threads * kPartsOfThread);
    std::vector<Part> parts;
    for (std::uint64_t i = 0; i < number; ++i) {
        Part part;
        part.begin = i == 0 ? 0 : parts.back().end;
        part.end = i + 1 == number ? places_of(tensor) : largest->indices[largest->count * (i + 1) / number];
        for (std::size_t rank = 0; rank < ranks.size(); ++rank)
            part.heads.push_back(head_of(ranks[rank], values[rank], tensor.width, part.begin, part.end));
        // Two and three are merged as four, of which some have nothing.
        if (part.heads.size() > 1 && part.heads.size() < 4) part.heads.resize(4);
        parts.push_back(std::move(part));
    }
    return parts;
}

template <class Body>
void run_parts(const Step& step, const std::vector<Part>& parts, unsigned threads, const std::string& variant) {
    const auto run = step_runner<Body, Step, Part>(step_variant(variant));
    in_pieces(std::vector<std::uint64_t>(parts.size(), 1), threads,
              [&](std::size_t part, std::uint64_t begin, std::uint64_t end) { run(step, parts[part], begin, end); });
}

// A step that is known to be valid, and what it reads.
struct Prepared {
    Step step;
    std::vector<std::vector<float>> wide;  // values that were sent in 16 bits
    std::vector<const float*> values;      // of each rank
};

Prepared prepared(const SparseTensor& tensor, const std::vector<SparseBlocks>& ranks, float scale, InstructionSet set) {
    Prepared found{checked(tensor, scale), {}, {}};
    if (ranks.empty()) refuse("blocks of no rank");
    found.wide.reserve(ranks.size());
    for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
        found.wide.push_back(widened(ranks[rank], tensor.width));
        const bool own = ranks[rank].type == SparseValues::float32;
        found.values.push_back(own ? static_cast<const float*>(ranks[rank].values) : found.wide.back().data());
        const char* why = fault(tensor, ranks[rank], found.values.back(), set);
        if (why != nullptr) refuse("rank " + std::to_string(rank) + ": not a sparse gradient: " + why);
    }
    return found;
}

}  // namespace

void sparse_update(const SparseTensor& tensor, const std::vector<SparseBlocks>& ranks, float scale, unsigned threads,
                   const std::string& variant) {
    sparse_update_all({tensor}, {ranks}, scale, threads, variant);
}

void sparse_update_all(const std::vector<SparseTensor>& tensors, const std::vector<std::vector<SparseBlocks>>& ranks, float scale,
                       unsigned threads, const std::string& variant) {
    if (ranks.size() != tensors.size()) refuse("blocks of other tensors");
    const InstructionSet set = step_variant(variant);
    std::vector<Prepared> updates;
    updates.reserve(tensors.size());
    for (std::size_t at = 0; at < tensors.size(); ++at) updates.push_back(prepared(tensors[at], ranks[at], scale, set));
    for (std::size_t at = 0; at < tensors.size(); ++at)
        run_parts<Update>(updates[at].step, parts_of(tensors[at], ranks[at], updates[at].values, threads), threads, variant);
}

void sparse_catch_up(const SparseTensor& tensor, unsigned threads, const std::string& variant) {
    const Step step = checked(tensor, 1.0f);
    if (tensor.touched == nullptr) refuse("no counters to catch up by");
    const std::uint64_t places = places_of(tensor), piece = kPartValues / tensor.width;
    check_counters(tensor, 0, places);
    std::vector<Part> parts;
    for (std::uint64_t begin = 0; begin < places; begin += piece) parts.push_back({begin, std::min(places, begin + piece), {}});
    run_parts<CatchUp>(step, parts, threads, variant);
}

}  // namespace lastgood

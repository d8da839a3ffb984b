#include "sparse/compress.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <exception>
#include <functional>
#include <mutex>
#include <numeric>
#include <vector>

#include "wire/half_bits.hpp"

namespace lastgood {
namespace {

constexpr std::uint64_t kSample = 16384;
constexpr std::uint64_t kMostSampled = 65536;
constexpr std::uint64_t kSampledShare = 256;
constexpr std::uint64_t kStreamElements = 4 << 20;  // larger ones than a cache are written past it
constexpr Weight kNever = 0xFFFFFFFF;               // heavier than anything

std::uint64_t mixed(std::uint64_t state) {
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9u;
    state = (state ^ state >> 27) * 0x94D049BB133111EBu;
    return state ^ state >> 31;
}

// Places of one piece that weigh more than a bound.
struct Piece {
    std::vector<std::uint32_t> indices;
    std::vector<Weight> weights;  // of blocks; an element's weight is in its value
    std::vector<float> values;
    std::uint64_t equal = 0;  // how many weigh as much as the bound
};

// A thread's room for one piece.
struct Room {
    std::vector<std::uint32_t> indices;
    std::vector<Weight> weights;
    std::vector<float> values;

    void fit(std::size_t width) {
        const std::size_t places = kPieceElements / width + kBlockWidth;
        if (indices.size() < places) indices.resize(places);
        if (width > 1 && weights.size() < places) weights.resize(places);
        if (values.size() < places * width) values.resize(places * width);
    }
};

thread_local Room room;

class Compression {
  public:
    Compression(const CompressOrder& order, const CompressKernels& kernels)
        : order_(order),
          kernels_(kernels),
          width_(order.width),
          places_((order.elements + order.width - 1) / order.width),
          pieces_((order.elements + kPieceElements - 1) / kPieceElements),
          source_(order.gradient),
          type_(order.gradient_type),
          residual_(order.residual) {}

    CompressResult run() {
        if (order_.target != nullptr && order_.target == residual_ && !finite()) return failed();
        if (order_.choice == SparseChoice::given || order_.choice == SparseChoice::all) {
            pass_known();
            if (!finite_) return failed();
            result_.count = order_.choice == SparseChoice::all ? places_ : order_.wanted;
            return result_;
        }
        choose();
        return finite_ ? result_ : failed();
    }

  private:
    const CompressOrder& order_;
    const CompressKernels& kernels_;
    const std::size_t width_;
    const std::uint64_t places_;
    const std::size_t pieces_;
    // What is looked at: gradient and residual at first, their sum once it is written.
    const void* source_;
    SparseType type_;
    const float* residual_;

    CompressResult result_;
    std::atomic<bool> finite_{true};
    std::mutex failing_;
    std::exception_ptr failure_;

    // Of the last collection.
    std::vector<Piece> found_;
    Weight bound_ = 0;
    Weight tentative_ = kNever;  // places of this weight have left the residual already
    bool overflow_ = false;

    CompressResult failed() const {
        CompressResult result;
        result.finite = false;
        result.reads = result_.reads;
        return result;
    }

    // Calls work(piece, begin, end) on all threads, in elements; what it throws is thrown here.
    template <class Work>
    void in_all_pieces(Work work) {
        in_pieces({order_.elements}, order_.threads, [&](std::size_t, std::uint64_t begin, std::uint64_t end) {
            try {
                work(std::size_t(begin / kPieceElements), begin, end);
            } catch (...) {
                const std::lock_guard<std::mutex> lock(failing_);
                if (!failure_) failure_ = std::current_exception();
            }
        });
        if (failure_) std::rethrow_exception(failure_);
    }

    const void* source_at(std::uint64_t at) const {
        return static_cast<const char*>(source_) + at * (type_ == SparseType::float32 ? 4 : 2);
    }

    // Sums of [at, at + count), in `strip` or where they are.
    const float* sums(std::uint64_t at, std::size_t count, float* strip) const {
        if (residual_ == nullptr && type_ == SparseType::float32) return static_cast<const float*>(source_) + at;
        kernels_.sum[int(type_)](source_at(at), residual_ == nullptr ? nullptr : residual_ + at, strip, count);
        return strip;
    }

    void count_reads() { result_.reads += residual_ == nullptr ? 1 : 2; }

    bool finite() {
        count_reads();
        in_all_pieces([&](std::size_t, std::uint64_t begin, std::uint64_t end) {
            alignas(64) float strip[kStripElements];
            for (std::uint64_t at = begin; at < end && finite_; at += kStripElements) {
                const std::size_t count = std::min<std::uint64_t>(kStripElements, end - at);
                if (kernels_.largest(sums(at, count, strip), count) >= kInfinity) finite_ = false;
            }
        });
        return finite_;
    }

    void write(std::uint64_t at, const float* strip, std::size_t count, bool past_caches) const {
        if (past_caches)
            kernels_.stream(order_.target + at, strip, count);
        else
            std::memcpy(order_.target + at, strip, count * sizeof(float));
    }

    bool past_caches() const { return order_.target != order_.residual && order_.elements >= kStreamElements; }

    // What is sent of a value goes to slot `at` of the values; returns what is left.
    float send(float value, std::uint64_t at) const {
        if (order_.value_type == SparseType::float32) {
            static_cast<float*>(order_.values)[at] = value;
            return 0.0f;
        }
        return value - narrowed(value, order_.value_type, static_cast<std::uint16_t*>(order_.values) + at);
    }

    float rest(float value) const {
        std::uint16_t stored;
        return value - narrowed(value, order_.value_type, &stored);
    }

    // One pass where it is known what is chosen.
    void pass_known() {
        count_reads();
        const bool all = order_.choice == SparseChoice::all;
        const std::uint32_t* const end_of_given = order_.indices + order_.wanted;
        const bool streamed = past_caches();
        in_all_pieces([&](std::size_t, std::uint64_t begin, std::uint64_t end) {
            alignas(64) float strip[kStripElements];
            const std::uint32_t* next = all ? nullptr : std::lower_bound<const std::uint32_t*>(order_.indices, end_of_given, std::uint32_t(begin));
            for (std::uint64_t at = begin; at < end && finite_; at += kStripElements) {
                const std::size_t count = std::min<std::uint64_t>(kStripElements, end - at);
                kernels_.sum[int(type_)](source_at(at), residual_ == nullptr ? nullptr : residual_ + at, strip, count);
                if (kernels_.largest(strip, count) >= kInfinity) {
                    finite_ = false;
                    break;
                }
                if (all) {
                    for (std::size_t i = 0; i < count; ++i) strip[i] = send(strip[i], at + i);
                } else {
                    for (; next != end_of_given && *next < at + count; ++next)
                        strip[*next - at] = send(strip[*next - at], std::uint64_t(next - order_.indices));
                }
                if (order_.target != nullptr) write(at, strip, count, streamed);
            }
        });
        if (!all || !finite_) return;
        for (std::uint64_t place = 0; place < places_; ++place) order_.indices[place] = std::uint32_t(place);
        for (std::uint64_t at = order_.elements; at < places_ * width_; ++at) send(0.0f, at);
    }

    // Stores all places above `bound`; in the first pass the sum as well, without those of at least `tentative`.
    void collect(Weight bound, Weight tentative, std::uint64_t most) {
        count_reads();
        const bool writes = order_.target != nullptr && residual_ != nullptr;
        const bool streamed = past_caches();
        bound_ = bound;
        tentative_ = writes ? std::max(tentative, bound + 1) : kNever;
        found_.assign(pieces_, Piece());
        std::atomic<std::uint64_t> total{0};
        in_all_pieces([&](std::size_t number, std::uint64_t begin, std::uint64_t end) {
            alignas(64) float strip[kStripElements];
            room.fit(width_);
            Piece& piece = found_[number];
            std::size_t stored = 0;
            for (std::uint64_t at = begin; at < end && finite_; at += kStripElements) {
                const std::size_t count = std::min<std::uint64_t>(kStripElements, end - at);
                const float* own = sums(at, count, strip);
                if (kernels_.largest(own, count) >= kInfinity) {
                    finite_ = false;
                    return;
                }
                if (total.load(std::memory_order_relaxed) <= most) {
                    const std::size_t before = stored;
                    stored = collect_strip(own, at, count, stored, piece);
                    for (std::size_t one = before; writes && one < stored; ++one)
                        if (tentative_ <= weight_of(room.weights.data(), room.values.data(), one))
                            for (std::size_t i = 0; i < width_; ++i) {
                                const std::uint64_t place = std::uint64_t(room.indices[one]) * width_ + i - at;
                                if (place < count) strip[place] = rest(room.values[one * width_ + i]);
                            }
                }
                if (writes) write(at, own, count, streamed);
            }
            total += stored;
            piece.indices.assign(room.indices.begin(), room.indices.begin() + std::ptrdiff_t(stored));
            piece.values.assign(room.values.begin(), room.values.begin() + std::ptrdiff_t(stored * width_));
            if (width_ > 1) piece.weights.assign(room.weights.begin(), room.weights.begin() + std::ptrdiff_t(stored));
        });
        overflow_ = total > most;
        if (writes) {
            source_ = order_.target;
            type_ = SparseType::float32;
            residual_ = nullptr;
        }
    }

    std::size_t collect_strip(const float* own, std::uint64_t at, std::size_t count, std::size_t stored, Piece& piece) const {
        std::uint32_t* const indices = room.indices.data() + stored;
        float* const values = room.values.data() + stored * width_;
        if (width_ == 1) {
            const Found found = kernels_.single(own, count, std::uint32_t(at), bound_, indices, values);
            piece.equal += found.equal;
            return stored + found.above;
        }
        const std::size_t blocks = count / kBlockWidth;
        const auto first = std::uint32_t(at / kBlockWidth);
        const Found found =
            kernels_.blocks(own, blocks, first, bound_, indices, room.weights.data() + stored, values);
        piece.equal += found.equal;
        stored += found.above;
        const std::size_t left = count % kBlockWidth;
        if (left == 0) return stored;
        const Weight weight = block_weight(own + blocks * kBlockWidth, left);
        piece.equal += weight == bound_;
        if (weight <= bound_) return stored;
        room.indices[stored] = first + std::uint32_t(blocks);
        room.weights[stored] = weight;
        std::copy_n(own + blocks * kBlockWidth, left, room.values.data() + stored * width_);
        std::fill_n(room.values.data() + stored * width_ + left, width_ - left, 0.0f);
        return stored + 1;
    }

    Weight weight_of(const Weight* weights, const float* values, std::size_t at) const {
        return width_ == 1 ? to_bits(values[at]) & kMagnitude : weights[at];
    }

    Weight weight_of(const Piece& piece, std::size_t at) const {
        return weight_of(piece.weights.data(), piece.values.data(), at);
    }

    // Writes a place's values into the residual: as they are, or what `send` leaves of them.
    void put(std::uint32_t index, const float* values) const {
        const std::uint64_t at = std::uint64_t(index) * width_;
        std::copy_n(values, std::min<std::uint64_t>(width_, order_.elements - at), order_.target + at);
    }

    // Undoes the last collection, which must not decide.
    void take_back() {
        if (tentative_ == kNever) return;
        for (const Piece& piece : found_)
            for (std::size_t one = 0; one < piece.indices.size(); ++one)
                if (weight_of(piece, one) >= tentative_) put(piece.indices[one], piece.values.data() + one * width_);
    }

    std::uint64_t above() const {
        return std::accumulate(found_.begin(), found_.end(), std::uint64_t(0),
                               [](std::uint64_t sum, const Piece& piece) { return sum + piece.indices.size(); });
    }

    std::uint64_t equal() const {
        return std::accumulate(found_.begin(), found_.end(), std::uint64_t(0),
                               [](std::uint64_t sum, const Piece& piece) { return sum + piece.equal; });
    }

    void choose() {
        std::uint64_t count = order_.wanted;
        if (order_.choice == SparseChoice::threshold) {
            count = order_.middle;
            if (order_.has_threshold && order_.threshold > 0) {
                if (by_threshold() || !finite_) return;
                if (!overflow_ && above() + equal() >= count) return take_heaviest(count);
                take_back();
            } else if (order_.has_threshold && places_ <= order_.most) {
                // A threshold of nothing lets all through.
                result_.held = true;
                count = places_;
            }
        }
        collect_sampled(count);
        if (!finite_) return;
        if (overflow_ || above() + equal() < count) {
            take_back();
            collect(heaviest_bound(count), kNever, places_);
        }
        take_heaviest(count);
    }

    // A bound somewhat under the threshold, so that its own fall seldom needs another pass.
    bool by_threshold() {
        const float lower = to_float(order_.threshold) * 0.9f;
        const Weight bound = std::min(order_.threshold - 1, to_bits(lower));
        collect(bound, order_.threshold, room_for(order_.most));
        if (!finite_ || overflow_) return false;
        std::uint64_t through = 0;
        for (const Piece& piece : found_)
            for (std::size_t one = 0; one < piece.indices.size(); ++one)
                through += weight_of(piece, one) >= order_.threshold;
        if (through < order_.wanted || through > order_.most) return false;
        result_.held = true;
        emit(order_.threshold, 0, {});
        return true;
    }

    std::uint64_t room_for(std::uint64_t count) const { return std::max<std::uint64_t>(4 * count, 2 * kPieceElements); }

    // Collects above a bound that a sample gives, which most likely leaves somewhat more than `count`.
    void collect_sampled(std::uint64_t count) {
        const std::uint64_t least = order_.sample == 0 ? kSample : order_.sample;
        const std::uint64_t size =
            std::min({places_, std::max(least, places_ / kSampledShare), std::max(least, kMostSampled)});
        std::vector<Weight> sample(size);
        for (std::uint64_t one = 0; one < size; ++one) {
            // One of each stretch, at a random place of it: data may have a period.
            const std::uint64_t begin = places_ * one / size;
            const std::uint64_t end = places_ * (one + 1) / size;
            sample[one] = sampled_weight(begin + mixed(one + 1) % (end - begin));
        }
        const double expected = double(size) * double(count) / double(places_);
        const double margin = size == places_ ? 0.0 : 4 * std::sqrt(expected) + 8;
        const auto rank = std::uint64_t(std::ceil(expected + margin));
        Weight bound = 0;
        if (rank <= size) {
            const auto nth = sample.begin() + std::ptrdiff_t(rank - 1);
            std::nth_element(sample.begin(), nth, sample.end(), std::greater<Weight>());
            bound = *nth;
        }
        Weight tentative = bound;
        if (margin > 0 && expected >= 1 && rank <= size) {
            const auto nth = sample.begin() + std::ptrdiff_t(expected) - 1;
            std::nth_element(sample.begin(), nth, sample.begin() + std::ptrdiff_t(rank), std::greater<Weight>());
            tentative = *nth;
        }
        collect(bound, tentative, size == places_ ? places_ : room_for(count));
    }

    Weight sampled_weight(std::uint64_t place) const {
        const std::uint64_t at = place * width_;
        const std::size_t count = std::min<std::uint64_t>(width_, order_.elements - at);
        float values[kBlockWidth];
        for (std::size_t i = 0; i < count; ++i) {
            values[i] = widened(source_, type_, at + i);
            if (residual_ != nullptr) values[i] += residual_[at + i];
        }
        return width_ == 1 ? to_bits(values[0]) & kMagnitude : block_weight(values, count);
    }

    // The weight of the `count`-th heaviest place, by two passes over all: the upper 16 bits of weights, then the lower 15.
    Weight heaviest_bound(std::uint64_t count) {
        std::uint64_t left = count;
        const Weight upper = heaviest_digit(15, 16, 0, 31, left);
        const Weight lower = heaviest_digit(0, 15, upper, 15, left);
        return upper << 15 | lower;
    }

    // Among weights that begin with `prefix` (from bit `prefix_bit` on): the digit of the `left`-th heaviest.
    Weight heaviest_digit(unsigned shift, unsigned bits, Weight prefix, unsigned prefix_bit, std::uint64_t& left) {
        count_reads();
        const Weight mask = (Weight(1) << bits) - 1;
        std::vector<std::uint64_t> total(std::size_t(mask) + 1);
        std::mutex adding;
        in_all_pieces([&](std::size_t, std::uint64_t begin, std::uint64_t end) {
            thread_local std::vector<std::uint32_t> counts;
            counts.assign(total.size(), 0);
            alignas(64) float strip[kStripElements];
            for (std::uint64_t at = begin; at < end; at += kStripElements) {
                const std::size_t count = std::min<std::uint64_t>(kStripElements, end - at);
                const float* own = sums(at, count, strip);
                for (std::size_t i = 0; i < count; i += width_) {
                    const Weight weight = width_ == 1 ? to_bits(own[i]) & kMagnitude
                                                      : block_weight(own + i, std::min(width_, count - i));
                    if (weight >> prefix_bit == prefix) ++counts[weight >> shift & mask];
                }
            }
            const std::lock_guard<std::mutex> lock(adding);
            for (std::size_t digit = 0; digit < counts.size(); ++digit) total[digit] += counts[digit];
        });
        std::size_t digit = total.size() - 1;
        while (total[digit] < left) left -= total[digit--];
        return Weight(digit);
    }

    // The `count` heaviest of what was collected, and of those that weigh as much as the bound.
    void take_heaviest(std::uint64_t count) {
        const std::uint64_t collected = above();
        if (collected < count) {
            result_.least = bound_;
            return emit(bound_ + 1, 0, equals(count - collected));
        }
        std::uint64_t ties = count;
        const Weight least = heaviest_collected(ties);
        result_.least = least;
        emit(least + 1, ties, {});
    }

    // Weight of the `ties`-th heaviest collected place; `ties` becomes how many of exactly that weight are among them.
    Weight heaviest_collected(std::uint64_t& ties) const {
        Weight most = bound_;
        for_weights([&](Weight weight) { most = std::max(most, weight); });
        unsigned shift = 0;
        while ((most - bound_) >> shift >= kBins) ++shift;
        std::vector<std::uint64_t> counts(kBins);
        for_weights([&](Weight weight) { ++counts[(weight - bound_) >> shift]; });
        std::size_t bin = kBins - 1;
        while (counts[bin] < ties) ties -= counts[bin--];
        std::vector<Weight> weights;
        weights.reserve(counts[bin]);
        for_weights([&](Weight weight) {
            if ((weight - bound_) >> shift == bin) weights.push_back(weight);
        });
        const auto nth = weights.begin() + std::ptrdiff_t(ties - 1);
        std::nth_element(weights.begin(), nth, weights.end(), std::greater<Weight>());
        const Weight least = *nth;
        for (const Weight weight : weights) ties -= weight > least;
        return least;
    }

    static constexpr std::size_t kBins = 4096;

    template <class Use>
    void for_weights(Use use) const {
        for (const Piece& piece : found_) {
            if (width_ == 1)
                for (const float value : piece.values) use(to_bits(value) & kMagnitude);
            else
                for (const Weight weight : piece.weights) use(weight);
        }
    }

    // The first `count` places that weigh exactly the bound, with their values.
    Piece equals(std::uint64_t count) {
        Piece equal;
        equal.indices.reserve(count);
        equal.values.reserve(count * width_);
        bool counted = false;
        for (std::size_t number = 0; number < pieces_ && equal.indices.size() < count; ++number) {
            if (found_[number].equal == 0) continue;
            if (!counted) count_reads();
            counted = true;
            equals_of(number, count, equal);
        }
        return equal;
    }

    void equals_of(std::size_t number, std::uint64_t most, Piece& equal) const {
        alignas(64) float strip[kStripElements];
        const std::uint64_t begin = number * kPieceElements;
        const std::uint64_t end = std::min(order_.elements, begin + kPieceElements);
        // What left the residual already may weigh as much as the bound by now.
        const std::vector<std::uint32_t>& taken = found_[number].indices;
        auto skip = taken.begin();
        for (std::uint64_t at = begin; at < end; at += kStripElements) {
            const std::size_t count = std::min<std::uint64_t>(kStripElements, end - at);
            const float* own = sums(at, count, strip);
            for (std::size_t i = 0; i < count; i += width_) {
                const auto index = std::uint32_t((at + i) / width_);
                while (skip != taken.end() && *skip < index) ++skip;
                const std::size_t given = std::min(width_, count - i);
                const Weight weight = width_ == 1 ? to_bits(own[i]) & kMagnitude : block_weight(own + i, given);
                if (weight != bound_ || (skip != taken.end() && *skip == index)) continue;
                equal.indices.push_back(index);
                equal.values.insert(equal.values.end(), own + i, own + i + given);
                equal.values.resize(equal.indices.size() * width_);
                if (equal.indices.size() == most) return;
            }
        }
    }

    // Sends what was collected from weight `least` on, the first `ties` of the weight just under it, and `equal`; and
    // makes the residual fit where it does not yet.
    void emit(Weight least, std::uint64_t ties, const Piece& equal) {
        std::uint64_t out = 0;
        std::size_t next = 0;
        const auto chosen = [&](std::uint32_t index, const float* values, bool left_already) {
            float rests[kBlockWidth];
            for (std::size_t i = 0; i < width_; ++i) rests[i] = send(values[i], out * width_ + i);
            order_.indices[out++] = index;
            if (order_.target != nullptr && !left_already) put(index, rests);
        };
        const auto equals_before = [&](std::uint64_t index) {
            for (; next < equal.indices.size() && equal.indices[next] < index; ++next)
                chosen(equal.indices[next], equal.values.data() + next * width_, false);
        };
        for (const Piece& piece : found_)
            for (std::size_t one = 0; one < piece.indices.size(); ++one) {
                const Weight weight = weight_of(piece, one);
                const float* const values = piece.values.data() + one * width_;
                const bool tie = weight + 1 == least && ties > 0;
                if (weight >= least || tie) {
                    ties -= tie;
                    equals_before(piece.indices[one]);
                    chosen(piece.indices[one], values, weight >= tentative_);
                } else if (weight >= tentative_) {
                    put(piece.indices[one], values);
                }
            }
        equals_before(places_);
        result_.count = out;
    }
};

}  // namespace

CompressResult compress(const CompressOrder& order, const std::string& variant) {
    return Compression(order, compress_kernels(step_variant(variant))).run();
}

void draw_places(std::uint64_t places, std::uint64_t count, std::uint64_t seed, std::uint64_t call,
                 std::uint32_t* indices) {
    constexpr int kRounds = 6;
    unsigned bits = 2;
    while (bits < 32 && (std::uint64_t(1) << bits) < places) ++bits;
    const unsigned left_bits = bits / 2;
    const unsigned right_bits = bits - left_bits;
    std::uint32_t keys[kRounds];
    std::uint64_t state = seed * 0x9E3779B97F4A7C15u + call * 0xD1342543DE82EF95u + places;
    for (std::uint32_t& key : keys) {
        state += 0x9E3779B97F4A7C15u;
        std::uint64_t one = (state ^ state >> 30) * 0xBF58476D1CE4E5B9u;
        one = (one ^ one >> 27) * 0x94D049BB133111EBu;
        key = std::uint32_t(one >> 32);
    }
    const auto scrambled = [](std::uint32_t value, std::uint32_t key) {
        value = (value ^ key) * 0x9E3779B1u;
        value = (value ^ value >> 15) * 0x85EBCA77u;
        return value ^ value >> 16;
    };
    for (std::uint64_t one = 0; one < count; ++one) {
        auto place = std::uint32_t(one);
        do {
            std::uint32_t left = place >> right_bits;
            std::uint32_t right = place & ((std::uint32_t(1) << right_bits) - 1);
            for (int round = 0; round < kRounds; round += 2) {
                left ^= scrambled(right, keys[round]) >> (32 - left_bits);
                right ^= scrambled(left, keys[round + 1]) >> (32 - right_bits);
            }
            place = left << right_bits | right;
        } while (place >= places);
        indices[one] = place;
    }
    std::sort(indices, indices + count);
}

}  // namespace lastgood

#include "sparse/compress.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "wire/half_bits.hpp"

namespace lastgood {
namespace {

constexpr std::uint64_t kLeastSample = 256;
constexpr std::uint64_t kSample = 2048;
constexpr std::uint64_t kMostSampled = 24576;
constexpr std::uint64_t kSampledShare = 256;
constexpr std::uint64_t kStreamElements = 4 << 20;  // larger ones than a cache are written past it
constexpr std::uint64_t kRoom = 1 << 16;             // places that may always be found
constexpr Weight kNever = 0xFFFFFFFF;               // heavier than anything

std::uint64_t mixed(std::uint64_t state) {
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9u;
    state = (state ^ state >> 27) * 0x94D049BB133111EBu;
    return state ^ state >> 31;
}

// Places with their values, and with their weights if they are blocks: an element's weight is in its value.
struct Places {
    std::unique_ptr<std::uint32_t[]> indices;
    std::unique_ptr<Weight[]> weights;
    std::unique_ptr<float[]> values;
    std::uint64_t bytes = 0;

    // Room for `count` places; what was there is lost. Memory is kept from call to call, since fresh pages cost more
    // than what is written to them; as much as that is not.
    static constexpr std::uint64_t kMostKept = 256 << 20;

    void fit(std::uint64_t count, std::size_t width) {
        const std::uint64_t needed = count * (width + 2) * sizeof(float);
        if (bytes >= needed) return;
        *this = Places();
        // Sizes that fit any width that needs no more bytes.
        indices.reset(new std::uint32_t[needed / sizeof(float) / 3 + 1]);
        weights.reset(new Weight[needed / sizeof(float) / 3 + 1]);
        values.reset(new float[needed / sizeof(float)]);
        bytes = needed;
    }
};

// Rooms for a piece each, of which every thread takes one at a time: threads are new in each call, and their memory would be.
class Rooms {
  public:
    std::unique_ptr<Places> take() {
        const std::lock_guard<std::mutex> lock(taking_);
        if (free_.empty()) return std::make_unique<Places>();
        std::unique_ptr<Places> room = std::move(free_.back());
        free_.pop_back();
        return room;
    }

    void give(std::unique_ptr<Places> room) {
        const std::lock_guard<std::mutex> lock(taking_);
        free_.push_back(std::move(room));
    }

  private:
    std::mutex taking_;
    std::vector<std::unique_ptr<Places>> free_;
};

// The calling thread's, for each piece and for all that was found.
thread_local Rooms piece_rooms;
thread_local Places found_room;

// Where in the room for all a piece's places are.
struct Piece {
    std::uint64_t begin = 0;
    std::size_t count = 0;
    std::uint64_t equal = 0;  // how many weigh as much as the bound
};

// Places of exactly the bound's weight.
struct Equals {
    std::vector<std::uint32_t> indices;
    std::vector<float> values;
};

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
        if (order_.choice == SparseChoice::given || order_.choice == SparseChoice::all) {
            if (in_place() && !finite(residual_)) {
                if (finite(nullptr)) keep();
                return failed();
            }
            pass_known();
            if (!finite_) return failed();
            result_.count = order_.choice == SparseChoice::all ? places_ : order_.wanted;
            return result_;
        }
        if (in_place() && !finite(nullptr)) return failed();
        choose();
        if (found_.bytes > Places::kMostKept) found_ = Places();
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

    Rooms& rooms_ = piece_rooms;  // a thread that helps has others under that name
    // Of the last collection.
    Places& found_ = found_room;
    std::vector<Piece> found_pieces_;
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

    bool in_place() const { return order_.target != nullptr && order_.target == order_.residual; }

    // Whether the gradient is finite, or its sum with a residual.
    bool finite(const float* residual) {
        result_.reads += residual == nullptr ? 1 : 2;
        std::atomic<bool> found{true};
        in_all_pieces([&](std::size_t, std::uint64_t begin, std::uint64_t end) {
            alignas(64) float strip[kStripElements];
            for (std::uint64_t at = begin; at < end && found; at += kStripElements) {
                const std::size_t count = std::min<std::uint64_t>(kStripElements, end - at);
                const float* own = strip;
                if (residual == nullptr && type_ == SparseType::float32)
                    own = static_cast<const float*>(source_) + at;
                else
                    kernels_.sum[int(type_)](source_at(at), residual == nullptr ? nullptr : residual + at, strip, count);
                if (kernels_.largest(own, count) >= kInfinity) found = false;
            }
        });
        return found;
    }

    // The gradient is finite, and its sum with the residual is not: elsewhere it stays in the residual.
    void keep() {
        in_all_pieces([&](std::size_t, std::uint64_t begin, std::uint64_t end) {
            alignas(64) float strip[kStripElements];
            for (std::uint64_t at = begin; at < end; at += kStripElements) {
                const std::size_t count = std::min<std::uint64_t>(kStripElements, end - at);
                kernels_.sum[int(type_)](source_at(at), residual_ + at, strip, count);
                keep_strip(at, strip, count);
                std::copy_n(strip, count, order_.target + at);
            }
        });
    }

    void keep_strip(std::uint64_t at, float* strip, std::size_t count) const {
        for (std::size_t i = 0; i < count; ++i)
            if ((to_bits(strip[i]) & kMagnitude) >= kInfinity) strip[i] = residual_[at + i];
    }

    // Whether the new residual is written past the caches: it would drive out of them all that is there.
    bool streams() const {
        return order_.target != order_.residual && order_.elements >= kStreamElements && residual_ != nullptr &&
               type_ == SparseType::float32 && reinterpret_cast<std::uintptr_t>(order_.target) % kStreamAlign == 0;
    }

    // What is sent of a value goes to slot `at` of the values; returns what is left.
    float send(float value, std::uint64_t at) const {
        if (order_.value_type == SparseType::float32) {
            static_cast<float*>(order_.values)[at] = value;
            return 0.0f;
        }
        return value - narrowed(value, order_.value_type, static_cast<std::uint16_t*>(order_.values) + at);
    }

    float rest(float value) const {
        if (order_.value_type == SparseType::float32) return 0.0f;
        std::uint16_t stored;
        return value - narrowed(value, order_.value_type, &stored);
    }

    // One pass where it is known what is chosen.
    void pass_known() {
        count_reads();
        const bool all = order_.choice == SparseChoice::all;
        const std::uint32_t* const end_of_given = order_.indices + order_.wanted;
        in_all_pieces([&](std::size_t, std::uint64_t begin, std::uint64_t end) {
            alignas(64) float strip[kStripElements];
            const std::uint32_t* next = all ? nullptr
                                            : std::lower_bound<const std::uint32_t*>(order_.indices, end_of_given,
                                                                                     std::uint32_t(begin));
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
                if (order_.target != nullptr) std::copy_n(strip, count, order_.target + at);
            }
        });
        if (!all || !finite_) return;
        for (std::uint64_t place = 0; place < places_; ++place) order_.indices[place] = std::uint32_t(place);
        for (std::uint64_t at = order_.elements; at < places_ * width_; ++at) send(0.0f, at);
    }

    // Stores all places above `bound`, unless they are more than `most`; in the first pass writes the sum as well, mostly
    // without those of at least `tentative`.
    void collect(Weight bound, Weight tentative, std::uint64_t most) {
        count_reads();
        const bool writes = order_.target != nullptr && residual_ != nullptr;
        const bool streamed = writes && streams();
        const bool added = writes && !streamed && type_ == SparseType::float32;  // to where it stays
        bound_ = bound;
        tentative_ = writes ? std::max(tentative, bound + 1) : kNever;
        // Past the caches nothing can be changed a moment later.
        if (streamed && (width_ > 1 || order_.value_type != SparseType::float32)) tentative_ = kNever;
        found_.fit(most, width_);
        found_pieces_.assign(pieces_, Piece());
        std::atomic<std::uint64_t> total{0};
        in_all_pieces([&](std::size_t number, std::uint64_t begin, std::uint64_t end) {
            alignas(64) float strip[kStripElements];
            std::unique_ptr<Places> taken = rooms_.take();
            Places& room = *taken;
            room.fit(kPieceElements / width_ + kBlockWidth, width_);
            Piece& piece = found_pieces_[number];
            for (std::uint64_t at = begin; at < end && (finite_ || in_place()); at += kStripElements) {
                const std::size_t count = std::min<std::uint64_t>(kStripElements, end - at);
                const bool streams_strip = streamed && count % kBlockWidth == 0;
                const float* own = strip;
                bool good = true;
                // Once there are too many, none is stored any more: all must stay in the residual.
                const bool counts = total.load(std::memory_order_relaxed) <= most;
                if (streams_strip) {
                    kernels_.sum_stream(static_cast<const float*>(source_) + at, residual_ + at, strip, count,
                                        order_.target + at, counts ? tentative_ : kNever);
                } else if (added) {
                    own = order_.target + at;
                    good = kernels_.add(static_cast<const float*>(source_) + at, residual_ + at, count, order_.target + at);
                } else {
                    own = sums(at, count, strip);
                }
                const std::size_t before = piece.count;
                if (counts && good) collect_strip(own, at, count, room, piece);
                if (!added) good = strip_finite(own, count, counts, room, before, piece.count);
                if (!good) {
                    finite_ = false;
                    if (!in_place()) return;
                    piece.count = before;
                    if (added) continue;
                    keep_strip(at, strip, count);
                    std::copy_n(strip, count, order_.target + at);
                    continue;
                }
                if (!writes || streams_strip) continue;
                float* const left = added ? order_.target + at : strip;
                for (std::size_t one = before; one < piece.count; ++one)
                    if (tentative_ <= weight_of(room, one)) leave(room, one, at, left, count);
                if (!added) std::copy_n(strip, count, order_.target + at);
            }
            if (streamed) kernels_.streamed();
            store(room, piece, total, most);
            rooms_.give(std::move(taken));
        });
        overflow_ = total > most;
        if (writes) {
            source_ = order_.target;
            type_ = SparseType::float32;
            residual_ = nullptr;
        }
    }

    // What is not finite weighs more than any bound: usually only places that were stored need a look.
    bool strip_finite(const float* own, std::size_t count, bool counted, const Places& room, std::size_t from,
                      std::size_t to) const {
        bool heavy = !counted || bound_ >= kInfinity;
        for (std::size_t one = from; one < to; ++one) heavy |= weight_of(room, one) >= kInfinity;
        return !heavy || kernels_.largest(own, count) < kInfinity;
    }

    // Leaves in a strip what sending a place leaves of it.
    void leave(const Places& places, std::size_t one, std::uint64_t at, float* strip, std::size_t count) const {
        const std::uint64_t first = std::uint64_t(places.indices[one]) * width_ - at;
        for (std::size_t i = 0; i < width_ && first + i < count; ++i)
            strip[first + i] = rest(places.values[one * width_ + i]);
    }

    // Moves a piece's places to where those of all are kept.
    void store(const Places& room, Piece& piece, std::atomic<std::uint64_t>& total, std::uint64_t most) const {
        piece.begin = total.fetch_add(piece.count);
        if (piece.begin + piece.count > most) {
            // Those that fit nowhere are not in the residual either.
            for (std::size_t one = 0; one < piece.count && tentative_ != kNever; ++one)
                if (weight_of(room, one) >= tentative_) put(room.indices[one], &room.values[one * width_]);
            piece.count = 0;
            return;
        }
        std::copy_n(&room.indices[0], piece.count, &found_.indices[piece.begin]);
        std::copy_n(&room.values[0], piece.count * width_, &found_.values[piece.begin * width_]);
        if (width_ > 1) std::copy_n(&room.weights[0], piece.count, &found_.weights[piece.begin]);
    }

    void collect_strip(const float* own, std::uint64_t at, std::size_t count, Places& room, Piece& piece) const {
        std::uint32_t* const indices = &room.indices[piece.count];
        float* const values = &room.values[piece.count * width_];
        if (width_ == 1) {
            const Found found = kernels_.single(own, count, std::uint32_t(at), bound_, indices, values);
            piece.equal += found.equal;
            piece.count += found.above;
            return;
        }
        const std::size_t blocks = count / kBlockWidth;
        const auto first = std::uint32_t(at / kBlockWidth);
        const Found found =
            kernels_.blocks(own, blocks, first, bound_, indices, &room.weights[piece.count], values);
        piece.equal += found.equal;
        piece.count += found.above;
        const std::size_t left = count % kBlockWidth;
        if (left == 0) return;
        const Weight weight = block_weight(own + blocks * kBlockWidth, left);
        piece.equal += weight == bound_;
        if (weight <= bound_) return;
        room.indices[piece.count] = first + std::uint32_t(blocks);
        room.weights[piece.count] = weight;
        float* const last = &room.values[piece.count++ * width_];
        std::fill(std::copy_n(own + blocks * kBlockWidth, left, last), last + width_, 0.0f);
    }

    Weight weight_of(const Places& places, std::size_t at) const {
        return width_ == 1 ? to_bits(places.values[at]) & kMagnitude : places.weights[at];
    }

    // Writes a place's values into the residual.
    void put(std::uint32_t index, const float* values) const {
        const std::uint64_t at = std::uint64_t(index) * width_;
        std::copy_n(values, std::min<std::uint64_t>(width_, order_.elements - at), order_.target + at);
    }

    // Undoes the last collection, which must not decide.
    void take_back() const {
        if (tentative_ == kNever) return;
        for_places([&](std::size_t one) {
            if (weight_of(found_, one) >= tentative_) put(found_.indices[one], &found_.values[one * width_]);
        });
    }

    template <class Use>
    void for_places(Use use) const {
        for (const Piece& piece : found_pieces_)
            for (std::size_t one = 0; one < piece.count; ++one) use(piece.begin + one);
    }

    std::uint64_t above() const {
        std::uint64_t sum = 0;
        for (const Piece& piece : found_pieces_) sum += piece.count;
        return sum;
    }

    std::uint64_t equal() const {
        std::uint64_t sum = 0;
        for (const Piece& piece : found_pieces_) sum += piece.equal;
        return sum;
    }

    void choose() {
        const bool by_threshold = order_.choice == SparseChoice::threshold && order_.has_threshold;
        std::uint64_t count = order_.choice == SparseChoice::threshold ? order_.middle : order_.wanted;
        if (by_threshold && order_.threshold == 0 && places_ <= order_.most) {
            // A threshold of nothing lets all through.
            result_.held = true;
            count = places_;
        }
        const Weight threshold = by_threshold ? order_.threshold : 0;
        collect_sampled(count, threshold);
        if (!finite_) return in_place() ? take_back() : void();
        if (threshold > 0 && decided(threshold)) return;
        if (overflow_ || above() + equal() < count) {
            take_back();
            collect(heaviest_bound(count), kNever, count);
        }
        take_heaviest(count);
    }

    // Whether the threshold lets through as many as it may: then they are sent.
    bool decided(Weight threshold) {
        if (threshold <= bound_) {
            const std::uint64_t least = above() + equal();
            if (overflow_ || least > order_.most) return false;
            if (threshold == bound_) {
                if (least < order_.wanted) return false;
                result_.held = true;
                emit(bound_ + 1, 0);
                emit_equals(equals(equal()));
                return true;
            }
        }
        if (threshold <= bound_ || overflow_) {
            take_back();
            collect(threshold - 1, kNever, order_.most);
            if (overflow_) return false;
        }
        std::uint64_t through = 0;
        for_weights([&](Weight weight) { through += weight >= threshold; });
        if (through < order_.wanted || through > order_.most) return false;
        result_.held = true;
        emit(threshold, 0);
        return true;
    }

    // Collects above a bound that a sample gives, which most likely leaves somewhat more than `count`; and all of at least
    // `threshold` if that may be the one that decides.
    void collect_sampled(std::uint64_t count, Weight threshold) {
        // Of few places a sample would soon cost more than the pass itself.
        const std::uint64_t least =
            order_.sample == 0 ? std::clamp(places_ / 16, kLeastSample, kSample) : order_.sample;
        const std::uint64_t size =
            std::min(places_, std::max(least, std::min(places_ / kSampledShare, kMostSampled)));
        std::vector<Weight> sample = sampled(size);
        const double expected = double(size) * double(count) / double(places_);
        const double margin = size == places_ ? 0.0 : 4 * std::sqrt(expected) + 8;
        const auto rank = std::uint64_t(std::ceil(expected + margin));
        Weight bound = 0;
        Weight tentative = 0;
        if (rank <= size) {
            bound = nth_heaviest(sample, sample.size(), rank);
            // The `rank` heaviest are in front by now.
            tentative = size == places_ || expected < 1 ? bound : nth_heaviest(sample, rank, std::uint64_t(expected));
        }
        if (threshold > 0) {
            std::uint64_t through = 0;
            for (const Weight weight : sample) through += weight >= threshold;
            if (through < rank + rank / 2) bound = std::min(bound, threshold - 1);
            const double share = double(through) / double(size) * double(places_);
            if (share > 0.8 * double(order_.wanted) && share < 1.25 * double(order_.most)) tentative = threshold;
        }
        collect(bound, tentative, size == places_ ? places_ : std::max(4 * count, kRoom));
    }

    // Weights of one place in each of `size` stretches, at random: data may have a period.
    std::vector<Weight> sampled(std::uint64_t size) const {
        std::vector<Weight> sample(size);
        const std::size_t bytes = (type_ == SparseType::float32 ? 4 : 2) * width_;
        constexpr std::uint64_t kAhead = 16;
        std::uint64_t places[kAhead];
        for (std::uint64_t one = 0; one < size + kAhead; ++one) {
            std::uint64_t& place = places[one % kAhead];
            if (one >= kAhead) sample[one - kAhead] = sampled_weight(place);
            if (one >= size) continue;
            const std::uint64_t begin = places_ * one / size;
            const std::uint64_t length = places_ * (one + 1) / size - begin;
            place = begin + (mixed(one + 1) >> 32) * length / (std::uint64_t(1) << 32);
            __builtin_prefetch(static_cast<const char*>(source_) + place * bytes);
            if (residual_ != nullptr) __builtin_prefetch(residual_ + place * width_);
        }
        return sample;
    }

    // Among the first `size` weights.
    static Weight nth_heaviest(std::vector<Weight>& weights, std::uint64_t size, std::uint64_t rank) {
        const auto nth = weights.begin() + std::ptrdiff_t(rank - 1);
        std::nth_element(weights.begin(), nth, weights.begin() + std::ptrdiff_t(size), std::greater<Weight>());
        return *nth;
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
            emit(bound_ + 1, 0);
            return emit_equals(equals(count - collected));
        }
        std::uint64_t ties = count;
        const Weight least = heaviest_collected(ties);
        result_.least = least;
        emit(least + 1, ties);
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
        const Weight least = nth_heaviest(weights, weights.size(), ties);
        for (const Weight weight : weights) ties -= weight > least;
        return least;
    }

    static constexpr std::size_t kBins = 4096;

    template <class Use>
    void for_weights(Use use) const {
        if (width_ == 1)
            for_places([&](std::size_t one) { use(to_bits(found_.values[one]) & kMagnitude); });
        else
            for_places([&](std::size_t one) { use(found_.weights[one]); });
    }

    // The first `count` places that weigh exactly the bound, with their values.
    Equals equals(std::uint64_t count) {
        Equals equal;
        equal.indices.reserve(count);
        equal.values.reserve(count * width_);
        bool counted = false;
        for (std::size_t number = 0; number < pieces_ && equal.indices.size() < count; ++number) {
            if (found_pieces_[number].equal == 0) continue;
            if (!counted) count_reads();
            counted = true;
            equals_of(number, count, equal);
        }
        return equal;
    }

    void equals_of(std::size_t number, std::uint64_t most, Equals& equal) const {
        alignas(64) float strip[kStripElements];
        const std::uint64_t begin = number * kPieceElements;
        const std::uint64_t end = std::min(order_.elements, begin + kPieceElements);
        // What left the residual already may weigh as much as the bound by now.
        const std::uint32_t* skip = &found_.indices[found_pieces_[number].begin];
        const std::uint32_t* const last = skip + found_pieces_[number].count;
        for (std::uint64_t at = begin; at < end; at += kStripElements) {
            const std::size_t count = std::min<std::uint64_t>(kStripElements, end - at);
            const float* own = sums(at, count, strip);
            for (std::size_t i = 0; i < count; i += width_) {
                const auto index = std::uint32_t((at + i) / width_);
                while (skip != last && *skip < index) ++skip;
                const std::size_t given = std::min(width_, count - i);
                const Weight weight = width_ == 1 ? to_bits(own[i]) & kMagnitude : block_weight(own + i, given);
                if (weight != bound_ || (skip != last && *skip == index)) continue;
                equal.indices.push_back(index);
                equal.values.insert(equal.values.end(), own + i, own + i + given);
                equal.values.resize(equal.indices.size() * width_);
                if (equal.indices.size() == most) return;
            }
        }
    }

    // Sends what was collected from weight `least` on, and the first `ties` of the weight just under it; and makes the
    // residual fit where it does not yet.
    void emit(Weight least, std::uint64_t ties) {
        std::uint64_t out = 0;
        // Single elements whose residual is right already are only moved.
        const bool plain = width_ == 1 && order_.value_type == SparseType::float32 && ties == 0 &&
                           (order_.target == nullptr || tentative_ != kNever);
        for (const Piece& piece : found_pieces_) {
            if (piece.count == 0) continue;
            if (plain) {
                if (order_.target != nullptr) correct_residual(piece, least);
                out += kernels_.keep(&found_.indices[piece.begin], &found_.values[piece.begin], piece.count, least,
                                     order_.indices + out, static_cast<float*>(order_.values) + out);
                continue;
            }
            const std::size_t kept = keep_chosen(piece, least, ties);
            std::copy_n(&found_.indices[piece.begin], kept, order_.indices + out);
            const float* const values = &found_.values[piece.begin * width_];
            if (order_.value_type == SparseType::float32)
                std::copy_n(values, kept * width_, static_cast<float*>(order_.values) + out * width_);
            else
                for (std::size_t i = 0; i < kept * width_; ++i) send(values[i], out * width_ + i);
            out += kept;
        }
        result_.count = out;
    }

    // What left the residual and is not sent comes back, and what is sent leaves it.
    void correct_residual(const Piece& piece, Weight least) const {
        if (least == tentative_) return;
        const Weight low = std::min(least, tentative_), high = std::max(least, tentative_);
        for (std::size_t one = piece.begin; one < piece.begin + piece.count; ++one) {
            const Weight weight = to_bits(found_.values[one]) & kMagnitude;
            if (weight >= low && weight < high) order_.target[found_.indices[one]] = weight >= least ? 0.0f : found_.values[one];
        }
    }

    // Moves a piece's chosen places together; returns how many they are.
    std::size_t keep_chosen(const Piece& piece, Weight least, std::uint64_t& ties) {
        constexpr std::size_t kAhead = 16;
        const bool has_target = order_.target != nullptr;
        std::size_t kept = 0;
        for (std::size_t one = piece.begin; one < piece.begin + piece.count; ++one) {
            const Weight weight = weight_of(found_, one);
            bool chosen = weight >= least;
            if (weight + 1 == least && ties > 0) {
                --ties;
                chosen = true;
            }
            const float* const values = &found_.values[one * width_];
            if (has_target) {
                if (tentative_ == kNever && one + kAhead < piece.begin + piece.count)
                    __builtin_prefetch(order_.target + std::uint64_t(found_.indices[one + kAhead]) * width_, 1);
                if (chosen != (weight >= tentative_)) chosen ? put_rest(found_.indices[one], values) : put(found_.indices[one], values);
            }
            // Without a branch, which no CPU could foresee.
            found_.indices[piece.begin + kept] = found_.indices[one];
            std::copy_n(values, width_, &found_.values[(piece.begin + kept) * width_]);
            kept += chosen;
        }
        return kept;
    }

    void put_rest(std::uint32_t index, const float* values) const {
        float rests[kBlockWidth];
        for (std::size_t i = 0; i < width_; ++i) rests[i] = rest(values[i]);
        put(index, rests);
    }

    // Sends these as well, each at its place among what was sent.
    void emit_equals(const Equals& equal) {
        const std::size_t bytes = width_ * (order_.value_type == SparseType::float32 ? 4 : 2);
        auto* const values = static_cast<char*>(order_.values);
        std::uint64_t sent = result_.count;
        std::uint64_t left = equal.indices.size();
        result_.count = sent + left;
        for (std::uint64_t out = result_.count; left > 0;) {
            --out;
            if (sent > 0 && order_.indices[sent - 1] > equal.indices[left - 1]) {
                --sent;
                order_.indices[out] = order_.indices[sent];
                std::memcpy(values + out * bytes, values + sent * bytes, bytes);
                continue;
            }
            --left;
            const float* const own = &equal.values[left * width_];
            order_.indices[out] = equal.indices[left];
            for (std::size_t i = 0; i < width_; ++i) send(own[i], out * width_ + i);
            if (order_.target != nullptr) put_rest(equal.indices[left], own);
        }
    }
};

}  // namespace

CompressResult compress(const CompressOrder& order, const std::string& variant) {
    return Compression(order, compress_kernels(step_variant(variant))).run();
}

}  // namespace lastgood

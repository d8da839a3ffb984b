#include "sparse/compress.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "sparse/compress_bound.hpp"
#include "sparse/compress_found.hpp"
#include "sparse/compress_output.hpp"
#include "sparse/compress_source.hpp"
#include "wire/half_bits.hpp"

namespace lastgood {
namespace {

constexpr std::uint64_t kLeastSample = 256;
constexpr std::uint64_t kSample = 2048;
constexpr std::uint64_t kMostSampled = 24576;
constexpr std::uint64_t kSampledShare = 256;
constexpr std::uint64_t kRoom = 1 << 16;  // places that may always be found

// Which places are chosen; they are sent, and leave the residual.
class Compression {
  public:
    Compression(const CompressOrder& order, const CompressKernels& kernels)
        : order_(order),
          kernels_(kernels),
          width_(order.width),
          source_(order, kernels),
          output_(order),
          found_(source_, output_) {}

    CompressResult run() {
        if (order_.choice == SparseChoice::given || order_.choice == SparseChoice::all) {
            if (source_.in_place() && !source_.finite(source_.residual())) {
                if (source_.finite(nullptr)) source_.keep();
                return failed();
            }
            pass_known();
            if (!source_.is_finite) return failed();
            result_.count = order_.choice == SparseChoice::all ? source_.places : order_.wanted;
            return done();
        }
        if (source_.in_place() && !source_.finite(nullptr)) return failed();
        choose();
        found_.trim();
        return source_.is_finite ? done() : failed();
    }

  private:
    const CompressOrder& order_;
    const CompressKernels& kernels_;
    const std::size_t width_;
    CompressSource source_;
    const CompressOutput output_;
    PlaceCollection found_;
    CompressResult result_;

    CompressResult done() const {
        CompressResult result = result_;
        result.reads = source_.reads();
        return result;
    }

    CompressResult failed() const {
        CompressResult result;
        result.finite = false;
        result.reads = source_.reads();
        return result;
    }

    // One pass where it is known what is chosen.
    void pass_known() {
        source_.count_reads();
        const bool all = order_.choice == SparseChoice::all;
        const std::uint32_t* const end_of_given = order_.indices + order_.wanted;
        source_.in_all_pieces([&](std::size_t, std::uint64_t begin, std::uint64_t end) {
            alignas(64) float strip[kStripElements];
            const std::uint32_t* next = all ? nullptr
                                            : std::lower_bound<const std::uint32_t*>(order_.indices, end_of_given,
                                                                                     std::uint32_t(begin));
            for (std::uint64_t at = begin; at < end && source_.is_finite; at += kStripElements) {
                const std::size_t count = std::min<std::uint64_t>(kStripElements, end - at);
                source_.copied_sums(at, count, strip);
                if (kernels_.largest(strip, count) >= kInfinity) {
                    source_.is_finite = false;
                    break;
                }
                if (all) {
                    for (std::size_t i = 0; i < count; ++i) strip[i] = output_.send(strip[i], at + i);
                } else {
                    for (; next != end_of_given && *next < at + count; ++next)
                        strip[*next - at] = output_.send(strip[*next - at], std::uint64_t(next - order_.indices));
                }
                if (order_.target != nullptr) std::copy_n(strip, count, order_.target + at);
            }
        });
        if (!all || !source_.is_finite) return;
        for (std::uint64_t place = 0; place < source_.places; ++place) order_.indices[place] = std::uint32_t(place);
        for (std::uint64_t at = order_.elements; at < source_.places * width_; ++at) output_.send(0.0f, at);
    }

    void choose() {
        const bool by_threshold = order_.choice == SparseChoice::threshold && order_.has_threshold;
        std::uint64_t count = order_.choice == SparseChoice::threshold ? order_.middle : order_.wanted;
        if (by_threshold && order_.threshold == 0 && source_.places <= order_.most) {
            // A threshold of nothing lets all through.
            result_.held = true;
            count = source_.places;
        }
        const Weight threshold = by_threshold ? order_.threshold : 0;
        collect_sampled(count, threshold);
        if (!source_.is_finite) return source_.in_place() ? found_.take_back() : void();
        if (threshold > 0 && decided(threshold)) return;
        if (found_.overflow() || found_.above() + found_.equal() < count) {
            found_.take_back();
            found_.collect(heaviest_bound(source_, count), kNever, count);
        }
        take_heaviest(count);
    }

    // Whether the threshold lets through as many as it may: then they are sent.
    bool decided(Weight threshold) {
        if (threshold <= found_.bound()) {
            const std::uint64_t least = found_.above() + found_.equal();
            if (found_.overflow() || least > order_.most) return false;
            if (threshold == found_.bound()) {
                if (least < order_.wanted) return false;
                result_.held = true;
                emit(found_.bound() + 1, 0);
                emit_equals(found_.equals(found_.equal()));
                return true;
            }
        }
        if (threshold <= found_.bound() || found_.overflow()) {
            found_.take_back();
            found_.collect(threshold - 1, kNever, order_.most);
            if (found_.overflow()) return false;
        }
        std::uint64_t through = 0;
        found_.for_weights([&](Weight weight) { through += weight >= threshold; });
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
            order_.sample == 0 ? std::clamp(source_.places / 16, kLeastSample, kSample) : order_.sample;
        const std::uint64_t size =
            std::min(source_.places, std::max(least, std::min(source_.places / kSampledShare, kMostSampled)));
        std::vector<Weight> sample = sampled_weights(source_, size);
        const double expected = double(size) * double(count) / double(source_.places);
        const double margin = size == source_.places ? 0.0 : 4 * std::sqrt(expected) + 8;
        const auto rank = std::uint64_t(std::ceil(expected + margin));
        Weight bound = 0;
        Weight tentative = 0;
        if (rank <= size) {
            bound = nth_heaviest(sample, sample.size(), rank);
            // The `rank` heaviest are in front by now.
            tentative = size == source_.places || expected < 1 ? bound : nth_heaviest(sample, rank, std::uint64_t(expected));
        }
        if (threshold > 0) {
            std::uint64_t through = 0;
            for (const Weight weight : sample) through += weight >= threshold;
            if (through < rank + rank / 2) bound = std::min(bound, threshold - 1);
            const double share = double(through) / double(size) * double(source_.places);
            if (share > 0.8 * double(order_.wanted) && share < 1.25 * double(order_.most)) tentative = threshold;
        }
        found_.collect(bound, tentative, size == source_.places ? source_.places : std::max(4 * count, kRoom));
    }

    // The `count` heaviest of what was collected, and of those that weigh as much as the bound.
    void take_heaviest(std::uint64_t count) {
        const std::uint64_t collected = found_.above();
        if (collected < count) {
            result_.least = found_.bound();
            emit(found_.bound() + 1, 0);
            return emit_equals(found_.equals(count - collected));
        }
        std::uint64_t ties = count;
        const Weight least = found_.heaviest_collected(ties);
        result_.least = least;
        emit(least + 1, ties);
    }

    // Sends what was collected from weight `least` on, and the first `ties` of the weight just under it; and makes the
    // residual fit where it does not yet.
    void emit(Weight least, std::uint64_t ties) {
        std::uint64_t out = 0;
        // Single elements whose residual is right already are only moved.
        const bool plain = width_ == 1 && order_.value_type == SparseType::float32 && ties == 0 &&
                           (order_.target == nullptr || found_.tentative() != kNever);
        for (const FoundPiece& piece : found_.pieces()) {
            if (piece.count == 0) continue;
            if (plain) {
                if (order_.target != nullptr) correct_residual(piece, least);
                out += kernels_.keep(&found_.found().indices[piece.begin], &found_.found().values[piece.begin], piece.count, least,
                                     order_.indices + out, static_cast<float*>(order_.values) + out);
                continue;
            }
            const std::size_t kept = keep_chosen(piece, least, ties);
            std::copy_n(&found_.found().indices[piece.begin], kept, order_.indices + out);
            const float* const values = &found_.found().values[piece.begin * width_];
            if (order_.value_type == SparseType::float32)
                std::copy_n(values, kept * width_, static_cast<float*>(order_.values) + out * width_);
            else
                for (std::size_t i = 0; i < kept * width_; ++i) output_.send(values[i], out * width_ + i);
            out += kept;
        }
        result_.count = out;
    }

    // What left the residual and is not sent comes back, and what is sent leaves it.
    void correct_residual(const FoundPiece& piece, Weight least) const {
        const Weight tentative = found_.tentative();
        if (least == tentative) return;
        const FoundPlaces& places = found_.found();
        const Weight low = std::min(least, tentative), high = std::max(least, tentative);
        for (std::size_t one = piece.begin; one < piece.begin + piece.count; ++one) {
            const Weight weight = to_bits(places.values[one]) & kMagnitude;
            if (weight >= low && weight < high)
                order_.target[places.indices[one]] = weight >= least ? 0.0f : places.values[one];
        }
    }

    // Moves a piece's chosen places together; returns how many they are.
    std::size_t keep_chosen(const FoundPiece& piece, Weight least, std::uint64_t& ties) {
        constexpr std::size_t kAhead = 16;
        const bool has_target = order_.target != nullptr;
        const Weight tentative = found_.tentative();
        FoundPlaces& places = found_.found();
        std::size_t kept = 0;
        for (std::size_t one = piece.begin; one < piece.begin + piece.count; ++one) {
            const Weight weight = found_.weight_of(places, one);
            bool chosen = weight >= least;
            if (weight + 1 == least && ties > 0) {
                --ties;
                chosen = true;
            }
            const float* const values = &places.values[one * width_];
            if (has_target) {
                if (tentative == kNever && one + kAhead < piece.begin + piece.count)
                    __builtin_prefetch(order_.target + std::uint64_t(places.indices[one + kAhead]) * width_, 1);
                if (chosen != (weight >= tentative))
                    chosen ? output_.put_rest(places.indices[one], values) : output_.put(places.indices[one], values);
            }
            // Without a branch, which no CPU could foresee.
            places.indices[piece.begin + kept] = places.indices[one];
            std::copy_n(values, width_, &places.values[(piece.begin + kept) * width_]);
            kept += chosen;
        }
        return kept;
    }

    // Sends these as well, each at its place among what was sent.
    void emit_equals(const EqualPlaces& equal) {
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
            for (std::size_t i = 0; i < width_; ++i) output_.send(own[i], out * width_ + i);
            if (order_.target != nullptr) output_.put_rest(equal.indices[left], own);
        }
    }
};

}  // namespace

CompressResult compress(const CompressOrder& order, const std::string& variant) {
    return Compression(order, compress_kernels(step_variant(variant))).run();
}

}  // namespace lastgood

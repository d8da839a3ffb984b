#include "sparse/compress_found.hpp"

#include <algorithm>
#include <mutex>
#include <utility>

#include "sparse/compress_bound.hpp"

namespace lastgood {

// Rooms for a piece each, of which every thread takes one at a time: threads are new in each call, and their memory would be.
class FoundRooms {
  public:
    std::unique_ptr<FoundPlaces> take() {
        const std::lock_guard<std::mutex> lock(taking_);
        if (free_.empty()) return std::make_unique<FoundPlaces>();
        std::unique_ptr<FoundPlaces> room = std::move(free_.back());
        free_.pop_back();
        return room;
    }

    void give(std::unique_ptr<FoundPlaces> room) {
        const std::lock_guard<std::mutex> lock(taking_);
        free_.push_back(std::move(room));
    }

  private:
    std::mutex taking_;
    std::vector<std::unique_ptr<FoundPlaces>> free_;
};

namespace {

// The calling thread's, for each piece and for all that was found.
thread_local FoundRooms piece_rooms;
thread_local FoundPlaces found_room;
constexpr std::size_t kBins = 4096;
constexpr std::size_t kLongStrip = 8 * kStripElements;

}  // namespace

PlaceCollection::PlaceCollection(CompressSource& source, const CompressOutput& output)
    : source_(source),
      output_(output),
      order_(source.order),
      kernels_(source.kernels),
      width_(source.width),
      rooms_(piece_rooms),  // a thread that helps has others under that name
      found_(found_room) {}

void PlaceCollection::collect(Weight bound, Weight tentative, std::uint64_t most) {
    source_.count_reads();
    const bool writes = order_.target != nullptr && source_.residual() != nullptr;
    const bool streamed = writes && source_.streams();
    const bool added = writes && !streamed && source_.type() == SparseType::float32;  // to where it stays
    bound_ = bound;
    tentative_ = writes ? std::max(tentative, bound + 1) : kNever;
    // Past the caches nothing can be changed a moment later.
    if (streamed && (width_ > 1 || order_.value_type != SparseType::float32)) tentative_ = kNever;
    found_.fit(most, width_);
    found_pieces_.assign(source_.pieces, FoundPiece());
    // What is looked at where it lies needs no room of its own; fewer strips cost less.
    const bool lies = !writes && source_.residual() == nullptr && source_.type() == SparseType::float32;
    const std::size_t stride = lies ? kLongStrip : kStripElements;
    std::atomic<std::uint64_t> total{0};
    const float* const gradient = source_.floats_at(0);
    const float* const residual = source_.residual();
    source_.in_all_pieces([&](std::size_t number, std::uint64_t begin, std::uint64_t end) {
        alignas(64) float strip[kStripElements];
        std::unique_ptr<FoundPlaces> taken = rooms_.take();
        FoundPlaces& room = *taken;
        room.fit(kPieceElements / width_ + kBlockWidth, width_);
        FoundPiece& piece = found_pieces_[number];
        for (std::uint64_t at = begin; at < end && (source_.is_finite || source_.in_place()); at += stride) {
            const std::size_t count = std::min<std::uint64_t>(stride, end - at);
            const bool streams_strip = streamed && count % kBlockWidth == 0;
            const float* own = strip;
            bool good = true;
            // Once there are too many, none is stored any more: all must stay in the residual.
            const bool counts = total.load(std::memory_order_relaxed) <= most;
            if (streams_strip) {
                kernels_.sum_stream(gradient + at, residual + at, strip, count, order_.target + at,
                                    counts ? tentative_ : kNever);
            } else if (added) {
                own = order_.target + at;
                good = kernels_.add(gradient + at, residual + at, count, order_.target + at);
            } else {
                own = source_.sums(at, count, strip);
            }
            const std::size_t before = piece.count;
            if (counts && good) collect_strip(own, at, count, room, piece);
            if (!added) good = strip_finite(own, count, counts, room, before, piece.count);
            if (!good) {
                source_.is_finite = false;
                if (!source_.in_place()) return;
                piece.count = before;
                if (added) continue;
                source_.keep_strip(at, strip, count);
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
    if (writes) source_.is_written();
}

bool PlaceCollection::strip_finite(const float* own, std::size_t count, bool counted, const FoundPlaces& room, std::size_t from,
                              std::size_t to) const {
    bool heavy = !counted || bound_ >= kInfinity;
    for (std::size_t one = from; one < to; ++one) heavy |= weight_of(room, one) >= kInfinity;
    return !heavy || kernels_.largest(own, count) < kInfinity;
}

void PlaceCollection::leave(const FoundPlaces& places, std::size_t one, std::uint64_t at, float* strip, std::size_t count) const {
    const std::uint64_t first = std::uint64_t(places.indices[one]) * width_ - at;
    for (std::size_t i = 0; i < width_ && first + i < count; ++i)
        strip[first + i] = output_.rest(places.values[one * width_ + i]);
}

void PlaceCollection::store(const FoundPlaces& room, FoundPiece& piece, std::atomic<std::uint64_t>& total, std::uint64_t most) const {
    piece.begin = total.fetch_add(piece.count);
    if (piece.begin + piece.count > most) {
        // Those that fit nowhere are not in the residual either.
        for (std::size_t one = 0; one < piece.count && tentative_ != kNever; ++one)
            if (weight_of(room, one) >= tentative_) output_.put(room.indices[one], &room.values[one * width_]);
        piece.count = 0;
        return;
    }
    std::copy_n(&room.indices[0], piece.count, &found_.indices[piece.begin]);
    std::copy_n(&room.values[0], piece.count * width_, &found_.values[piece.begin * width_]);
    if (width_ > 1) std::copy_n(&room.weights[0], piece.count, &found_.weights[piece.begin]);
}

void PlaceCollection::collect_strip(const float* own, std::uint64_t at, std::size_t count, FoundPlaces& room, FoundPiece& piece) const {
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

void PlaceCollection::take_back() const {
    if (tentative_ == kNever) return;
    for_places([&](std::size_t one) {
        if (weight_of(found_, one) >= tentative_) output_.put(found_.indices[one], &found_.values[one * width_]);
    });
}

Weight PlaceCollection::heaviest_collected(std::uint64_t& ties) const {
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

EqualPlaces PlaceCollection::equals(std::uint64_t count) {
    EqualPlaces equal;
    equal.indices.reserve(count);
    equal.values.reserve(count * width_);
    bool counted = false;
    for (std::size_t number = 0; number < source_.pieces && equal.indices.size() < count; ++number) {
        if (found_pieces_[number].equal == 0) continue;
        if (!counted) source_.count_reads();
        counted = true;
        equals_of(number, count, equal);
    }
    return equal;
}

void PlaceCollection::equals_of(std::size_t number, std::uint64_t most, EqualPlaces& equal) const {
    alignas(64) float strip[kStripElements];
    const std::uint64_t begin = number * kPieceElements;
    const std::uint64_t end = std::min(order_.elements, begin + kPieceElements);
    // What left the residual already may weigh as much as the bound by now.
    const std::uint32_t* skip = &found_.indices[found_pieces_[number].begin];
    const std::uint32_t* const last = skip + found_pieces_[number].count;
    for (std::uint64_t at = begin; at < end; at += kStripElements) {
        const std::size_t count = std::min<std::uint64_t>(kStripElements, end - at);
        const float* own = source_.sums(at, count, strip);
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

}  // namespace lastgood

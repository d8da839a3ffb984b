// Places that are heavier than a bound, as a pass over all of them finds them, with their values.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "sparse/compress_output.hpp"
#include "sparse/compress_source.hpp"
#include "wire/half_bits.hpp"

namespace lastgood {

constexpr Weight kNever = 0xFFFFFFFF;  // heavier than anything

// Places with their values, and with their weights if they are blocks: an element's weight is in its value.
struct FoundPlaces {
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
        *this = FoundPlaces();
        // Sizes that fit any width that needs no more bytes.
        indices.reset(new std::uint32_t[needed / sizeof(float) / 3 + 1]);
        weights.reset(new Weight[needed / sizeof(float) / 3 + 1]);
        values.reset(new float[needed / sizeof(float)]);
        bytes = needed;
    }
};

class FoundRooms;

// Where in the room for all a piece's places are.
struct FoundPiece {
    std::uint64_t begin = 0;
    std::size_t count = 0;
    std::uint64_t equal = 0;  // how many weigh as much as the bound
};

// Places of exactly the bound's weight.
struct EqualPlaces {
    std::vector<std::uint32_t> indices;
    std::vector<float> values;
};

class PlaceCollection {
  public:
    // The memory is the calling thread's, kept from call to call: one collection at a time.
    PlaceCollection(CompressSource& source, const CompressOutput& output);

    // Stores all places above `bound`, unless they are more than `most`; in the first pass writes the sum as well, mostly
    // without those of at least `tentative`.
    void collect(Weight bound, Weight tentative, std::uint64_t most);

    // Undoes the last collection, which must not decide.
    void take_back() const;

    std::uint64_t above() const {
        std::uint64_t sum = 0;
        for (const FoundPiece& piece : found_pieces_) sum += piece.count;
        return sum;
    }

    std::uint64_t equal() const {
        std::uint64_t sum = 0;
        for (const FoundPiece& piece : found_pieces_) sum += piece.equal;
        return sum;
    }

    // Weight of the `ties`-th heaviest collected place; `ties` becomes how many of exactly that weight are among them.
    Weight heaviest_collected(std::uint64_t& ties) const;

    // The first `count` places that weigh exactly the bound, with their values.
    EqualPlaces equals(std::uint64_t count);

    Weight weight_of(const FoundPlaces& places, std::size_t at) const {
        return width_ == 1 ? to_bits(places.values[at]) & kMagnitude : places.weights[at];
    }

    template <class Use>
    void for_places(Use use) const {
        for (const FoundPiece& piece : found_pieces_)
            for (std::size_t one = 0; one < piece.count; ++one) use(piece.begin + one);
    }

    template <class Use>
    void for_weights(Use use) const {
        if (width_ == 1)
            for_places([&](std::size_t one) { use(to_bits(found_.values[one]) & kMagnitude); });
        else
            for_places([&](std::size_t one) { use(found_.weights[one]); });
    }

    // Gives memory back that would be too much to keep.
    void trim() {
        if (found_.bytes > FoundPlaces::kMostKept) found_ = FoundPlaces();
    }

    FoundPlaces& found() { return found_; }
    const FoundPlaces& found() const { return found_; }
    const std::vector<FoundPiece>& pieces() const { return found_pieces_; }
    Weight bound() const { return bound_; }
    // Places of this weight have left the residual already.
    Weight tentative() const { return tentative_; }
    // There were more than were to be stored.
    bool overflow() const { return overflow_; }

  private:
    // What is not finite weighs more than any bound: usually only places that were stored need a look.
    bool strip_finite(const float* own, std::size_t count, bool counted, const FoundPlaces& room, std::size_t from,
                      std::size_t to) const;

    // Leaves in a strip what sending a place leaves of it.
    void leave(const FoundPlaces& places, std::size_t one, std::uint64_t at, float* strip, std::size_t count) const;

    // Moves a piece's places to where those of all are kept.
    void store(const FoundPlaces& room, FoundPiece& piece, std::atomic<std::uint64_t>& total, std::uint64_t most) const;

    void collect_strip(const float* own, std::uint64_t at, std::size_t count, FoundPlaces& room, FoundPiece& piece) const;

    void equals_of(std::size_t number, std::uint64_t most, EqualPlaces& equal) const;

    CompressSource& source_;
    const CompressOutput& output_;
    const CompressOrder& order_;
    const CompressKernels& kernels_;
    const std::size_t width_;
    FoundRooms& rooms_;
    FoundPlaces& found_;
    std::vector<FoundPiece> found_pieces_;
    Weight bound_ = 0;
    Weight tentative_ = kNever;
    bool overflow_ = false;
};

}  // namespace lastgood

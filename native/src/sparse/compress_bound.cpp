#include "sparse/compress_bound.hpp"

#include <algorithm>
#include <functional>
#include <mutex>

#include "wire/half_bits.hpp"

namespace lastgood {
namespace {

std::uint64_t mixed(std::uint64_t state) {
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9u;
    state = (state ^ state >> 27) * 0x94D049BB133111EBu;
    return state ^ state >> 31;
}

// Among weights that begin with `prefix` (from bit `prefix_bit` on): the digit of the `left`-th heaviest.
Weight heaviest_digit(CompressSource& source, unsigned shift, unsigned bits, Weight prefix, unsigned prefix_bit,
                      std::uint64_t& left) {
    source.count_reads();
    const Weight mask = (Weight(1) << bits) - 1;
    std::vector<std::uint64_t> total(std::size_t(mask) + 1);
    std::mutex adding;
    source.in_all_pieces([&](std::size_t, std::uint64_t begin, std::uint64_t end) {
        thread_local std::vector<std::uint32_t> counts;
        counts.assign(total.size(), 0);
        alignas(64) float strip[kStripElements];
        for (std::uint64_t at = begin; at < end; at += kStripElements) {
            const std::size_t count = std::min<std::uint64_t>(kStripElements, end - at);
            const float* own = source.sums(at, count, strip);
            for (std::size_t i = 0; i < count; i += source.width) {
                const Weight weight = source.width == 1 ? to_bits(own[i]) & kMagnitude
                                                         : block_weight(own + i, std::min(source.width, count - i));
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

}  // namespace

std::vector<Weight> sampled_weights(const CompressSource& source, std::uint64_t size) {
    std::vector<Weight> sample(size);
    constexpr std::uint64_t kAhead = 16;
    std::uint64_t places[kAhead];
    for (std::uint64_t one = 0; one < size + kAhead; ++one) {
        std::uint64_t& place = places[one % kAhead];
        if (one >= kAhead) sample[one - kAhead] = source.weight(place);
        if (one >= size) continue;
        const std::uint64_t begin = source.places * one / size;
        const std::uint64_t length = source.places * (one + 1) / size - begin;
        place = begin + (mixed(one + 1) >> 32) * length / (std::uint64_t(1) << 32);
        source.prefetch(place);
    }
    return sample;
}

Weight nth_heaviest(std::vector<Weight>& weights, std::uint64_t size, std::uint64_t rank) {
    const auto nth = weights.begin() + std::ptrdiff_t(rank - 1);
    std::nth_element(weights.begin(), nth, weights.begin() + std::ptrdiff_t(size), std::greater<Weight>());
    return *nth;
}

Weight heaviest_bound(CompressSource& source, std::uint64_t count) {
    std::uint64_t left = count;
    const Weight upper = heaviest_digit(source, 15, 16, 0, 31, left);
    const Weight lower = heaviest_digit(source, 0, 15, upper, 15, left);
    return upper << 15 | lower;
}

}  // namespace lastgood

#include <algorithm>

#include "sparse/compress.hpp"

namespace lastgood {

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

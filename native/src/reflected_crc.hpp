// What the reflected CRCs of 32 bits share, whatever their polynomial: tables, powers of x, and folding by carry-less
// multiplication. In the reflected form, bit i of a value is the coefficient of x^(31-i). A *register* is a checksum
// without its initial and final inversion.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace lastgood {

template <std::uint32_t Polynomial>
class ReflectedCrc {
public:
    // The register after `nbytes`, eight bytes at a time through eight tables. On any CPU.
    static std::uint32_t update_by_tables(const std::uint8_t* at, std::size_t nbytes, std::uint32_t crc) {
        const auto& table = kTables.entry;
        for (; nbytes >= 8; at += 8, nbytes -= 8) {
            // Byte by byte, so that it is right on a big-endian machine too.
            const std::uint32_t head = crc ^ (std::uint32_t(at[0]) | std::uint32_t(at[1]) << 8 |
                                              std::uint32_t(at[2]) << 16 | std::uint32_t(at[3]) << 24);
            crc = table[7][head & 0xFFu] ^ table[6][head >> 8 & 0xFFu] ^ table[5][head >> 16 & 0xFFu] ^
                  table[4][head >> 24] ^ table[3][at[4]] ^ table[2][at[5]] ^ table[1][at[6]] ^ table[0][at[7]];
        }
        for (; nbytes > 0; ++at, --nbytes) crc = (crc >> 8) ^ table[0][(crc ^ *at) & 0xFFu];
        return crc;
    }

    static std::uint32_t sum_portable(const void* data, std::size_t nbytes, std::uint32_t seed) {
        return ~update_by_tables(static_cast<const std::uint8_t*>(data), nbytes, ~seed);
    }

    // x^exponent modulo the polynomial.
    static std::uint32_t power_of_x(std::size_t exponent) {
        std::uint32_t value = 0x80000000u;
        while (exponent-- > 0) value = times_x(value);
        return value;
    }

    // What moves 128 bits forward by a number of bits, d: their first 64 are multiplied by x^(d+64) and the last by
    // x^d. A reflected product comes out one bit high, hence the -1. A factor sits in the upper half of its 64 bits.
    struct FoldFactors {
        std::uint64_t words[2];
        explicit FoldFactors(std::size_t bits)
            : words{std::uint64_t(power_of_x(bits + 63)) << 32, std::uint64_t(power_of_x(bits - 1)) << 32} {}
    };

private:
    static constexpr std::uint32_t times_x(std::uint32_t value) {
        return (value >> 1) ^ ((value & 1u) ? Polynomial : 0u);
    }

    struct Tables {
        std::uint32_t entry[8][256];

        constexpr Tables() : entry() {
            for (std::uint32_t byte = 0; byte < 256; ++byte) {
                std::uint32_t value = byte;
                for (int bit = 0; bit < 8; ++bit) value = times_x(value);
                entry[0][byte] = value;
            }
            for (int table = 1; table < 8; ++table) {
                for (int byte = 0; byte < 256; ++byte) {
                    const std::uint32_t before = entry[table - 1][byte];
                    entry[table][byte] = (before >> 8) ^ entry[0][before & 0xFFu];
                }
            }
        }
    };

    static const Tables kTables;
};

template <std::uint32_t Polynomial>
constexpr typename ReflectedCrc<Polynomial>::Tables ReflectedCrc<Polynomial>::kTables{};

#if defined(__x86_64__)

// Four times 128 bits at once: `value` moved forward by what `factors` stand for, and `next` added.
__attribute__((target("avx512f,vpclmulqdq"))) inline __m512i fold_wide(__m512i value, __m512i factors, __m512i next) {
    const __m512i first = _mm512_clmulepi64_epi128(value, factors, 0x00);
    const __m512i last = _mm512_clmulepi64_epi128(value, factors, 0x11);
    return _mm512_ternarylogic_epi64(first, last, next, 0x96);  // exclusive or of all three
}

// Whether this CPU has what `fold_wide` and the registers beside it need.
inline bool cpu_folds_wide() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("vpclmulqdq");
}

#endif

// The variant of that name, or the first for an empty name. Throws std::invalid_argument for any other name; `what` is
// the sum's name for that message.
template <typename Variant>
const Variant& variant_named(const std::vector<Variant>& variants, const std::string& name, const char* what) {
    std::string known;
    for (const Variant& variant : variants) {
        if (name.empty() || name == variant.name) return variant;
        known += known.empty() ? "" : ", ";
        known += variant.name;
    }
    throw std::invalid_argument(std::string("no ") + what + " variant '" + name + "' on this CPU; there are: " + known);
}

}  // namespace lastgood

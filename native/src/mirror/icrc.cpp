#include "mirror/icrc.hpp"

#include <cstring>
#include <stdexcept>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace lastgood::mirror {
namespace {

// In the reflected form, bit i of a 32-bit value is the coefficient of x^(31-i).
constexpr std::uint32_t kPolynomial = 0xEDB88320u;

constexpr std::uint32_t times_x(std::uint32_t value) { return (value >> 1) ^ ((value & 1u) ? kPolynomial : 0u); }

// ---------------------------------------------------------------------------------------------------------------------
// Portable: eight bytes at a time through eight tables. Takes and returns the register, without the inversions.

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

constexpr Tables kTables;

inline std::uint32_t update_by_tables(const std::uint8_t* at, std::size_t nbytes, std::uint32_t crc) {
    const auto& table = kTables.entry;
    for (; nbytes >= 8; at += 8, nbytes -= 8) {
        const std::uint32_t head = crc ^ (std::uint32_t(at[0]) | std::uint32_t(at[1]) << 8 |
                                          std::uint32_t(at[2]) << 16 | std::uint32_t(at[3]) << 24);
        crc = table[7][head & 0xFFu] ^ table[6][head >> 8 & 0xFFu] ^ table[5][head >> 16 & 0xFFu] ^
              table[4][head >> 24] ^ table[3][at[4]] ^ table[2][at[5]] ^ table[1][at[6]] ^ table[0][at[7]];
    }
    for (; nbytes > 0; ++at, --nbytes) crc = (crc >> 8) ^ table[0][(crc ^ *at) & 0xFFu];
    return crc;
}

std::uint32_t sum_portable(const void* data, std::size_t nbytes, std::uint32_t seed) {
    return ~update_by_tables(static_cast<const std::uint8_t*>(data), nbytes, ~seed);
}

#if defined(__x86_64__)

#define LASTGOOD_CLMUL __attribute__((target("sse4.1,pclmul")))
#define LASTGOOD_VCLMUL __attribute__((target("sse4.1,pclmul,avx512f,avx512bw,avx512vl,vpclmulqdq")))

// x^exponent modulo the polynomial.
std::uint32_t power_of_x(std::size_t exponent) {
    std::uint32_t value = 0x80000000u;
    while (exponent-- > 0) value = times_x(value);
    return value;
}

// To move 128 bits forward by d bits, the first 64 of them are multiplied by x^(d+64) and the last by x^d. A reflected
// product comes out one bit high, hence the -1. A factor sits in the upper half of its 64 bits.
struct Factors {
    std::uint64_t words[2];
    explicit Factors(std::size_t bits)
        : words{std::uint64_t(power_of_x(bits + 63)) << 32, std::uint64_t(power_of_x(bits - 1)) << 32} {}
};

struct AllFactors {
    Factors by_16{128}, by_64{512}, by_256{2048};
};

const AllFactors& factors() {
    static const AllFactors all;
    return all;
}

LASTGOOD_CLMUL inline __m128i load(const void* at) { return _mm_loadu_si128(static_cast<const __m128i*>(at)); }

LASTGOOD_CLMUL inline __m128i fold(__m128i value, __m128i by, __m128i next) {
    const __m128i first = _mm_clmulepi64_si128(value, by, 0x00);
    const __m128i last = _mm_clmulepi64_si128(value, by, 0x11);
    return _mm_xor_si128(_mm_xor_si128(first, last), next);
}

// The register after the 16 bytes that `value` stands for.
LASTGOOD_CLMUL inline std::uint32_t reduce(__m128i value) {
    std::uint8_t bytes[16];
    _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes), value);
    return update_by_tables(bytes, sizeof bytes, 0);
}

LASTGOOD_CLMUL std::uint32_t update_clmul(const std::uint8_t* at, std::size_t nbytes, std::uint32_t crc) {
    if (nbytes < 64) return update_by_tables(at, nbytes, crc);
    const AllFactors& all = factors();
    const __m128i by_64 = load(all.by_64.words), by_16 = load(all.by_16.words);
    __m128i lane[4] = {load(at), load(at + 16), load(at + 32), load(at + 48)};
    lane[0] = _mm_xor_si128(lane[0], _mm_cvtsi32_si128(int(crc)));
    at += 64;
    nbytes -= 64;
    for (; nbytes >= 64; at += 64, nbytes -= 64) {
        for (int number = 0; number < 4; ++number) lane[number] = fold(lane[number], by_64, load(at + 16 * number));
    }
    __m128i value = lane[0];
    for (int number = 1; number < 4; ++number) value = fold(value, by_16, lane[number]);
    for (; nbytes >= 16; at += 16, nbytes -= 16) value = fold(value, by_16, load(at));
    return update_by_tables(at, nbytes, reduce(value));
}

std::uint32_t sum_clmul(const void* data, std::size_t nbytes, std::uint32_t seed) {
    return ~update_clmul(static_cast<const std::uint8_t*>(data), nbytes, ~seed);
}

LASTGOOD_VCLMUL inline __m512i fold_wide(__m512i value, __m512i by, __m512i next) {
    const __m512i first = _mm512_clmulepi64_epi128(value, by, 0x00);
    const __m512i last = _mm512_clmulepi64_epi128(value, by, 0x11);
    return _mm512_ternarylogic_epi64(first, last, next, 0x96);  // exclusive or of all three
}

LASTGOOD_VCLMUL std::uint32_t sum_vclmul(const void* data, std::size_t nbytes, std::uint32_t seed) {
    const auto* at = static_cast<const std::uint8_t*>(data);
    std::uint32_t crc = ~seed;
    if (nbytes < 512) return ~update_clmul(at, nbytes, crc);
    const AllFactors& all = factors();
    const __m128i by_16 = load(all.by_16.words);
    const __m512i by_256 = _mm512_broadcast_i32x4(load(all.by_256.words));
    const __m512i by_64 = _mm512_broadcast_i32x4(load(all.by_64.words));
    __m512i lane[4];
    for (int number = 0; number < 4; ++number) lane[number] = _mm512_loadu_si512(at + 64 * number);
    lane[0] = _mm512_xor_si512(lane[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(int(crc))));
    at += 256;
    nbytes -= 256;
    for (; nbytes >= 256; at += 256, nbytes -= 256) {
        for (int number = 0; number < 4; ++number)
            lane[number] = fold_wide(lane[number], by_256, _mm512_loadu_si512(at + 64 * number));
    }
    __m512i wide = lane[0];
    for (int number = 1; number < 4; ++number) wide = fold_wide(wide, by_64, lane[number]);
    for (; nbytes >= 64; at += 64, nbytes -= 64) wide = fold_wide(wide, by_64, _mm512_loadu_si512(at));
    __m128i parts[4];
    _mm512_storeu_si512(parts, wide);
    __m128i value = parts[0];
    for (int number = 1; number < 4; ++number) value = fold(value, by_16, parts[number]);
    for (; nbytes >= 16; at += 16, nbytes -= 16) value = fold(value, by_16, load(at));
    return ~update_by_tables(at, nbytes, reduce(value));
}

#endif

std::vector<Crc32Variant> detect_variants() {
    std::vector<Crc32Variant> variants;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool clmul = __builtin_cpu_supports("sse4.1") && __builtin_cpu_supports("pclmul");
    if (clmul && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("vpclmulqdq"))
        variants.push_back({"vclmul", sum_vclmul});
    if (clmul) variants.push_back({"clmul", sum_clmul});
#endif
    variants.push_back({"portable", sum_portable});
    return variants;
}

constexpr std::size_t kUdpBytes = 8, kBthBytes = 12, kBthOnes = 4;
constexpr std::size_t kShortHead = 128;

std::uint32_t icrc_from(std::uint8_t* head, std::size_t head_bytes, const std::uint8_t* rest, std::size_t nbytes,
                        std::size_t udp) {
    if (head[0] >> 4 == 6) {
        head[0] |= 0x0F;
        head[1] = head[2] = head[3] = head[7] = 0xFF;
    } else {
        head[1] = head[8] = head[10] = head[11] = 0xFF;
    }
    head[udp + 6] = head[udp + 7] = 0xFF;
    head[udp + kUdpBytes + kBthOnes] = 0xFF;
    static const Crc32Variant& fastest = crc32_variants().front();
    static const std::uint32_t ones = sum_portable("\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF", 8, 0);
    return fastest.sum(rest, nbytes, fastest.sum(head, head_bytes, ones));
}

}  // namespace

const std::vector<Crc32Variant>& crc32_variants() {
    static const std::vector<Crc32Variant> variants = detect_variants();
    return variants;
}

const Crc32Variant& crc32_variant(const std::string& name) {
    std::string known;
    for (const Crc32Variant& variant : crc32_variants()) {
        if (name.empty() || name == variant.name) return variant;
        known += known.empty() ? "" : ", ";
        known += variant.name;
    }
    throw std::invalid_argument("no CRC-32 variant '" + name + "' on this CPU; there are: " + known);
}

std::uint32_t icrc(const std::uint8_t* packet, std::size_t nbytes, std::size_t udp) {
    const std::size_t head_bytes = udp + kUdpBytes + kBthBytes;
    if (head_bytes <= kShortHead) {
        std::uint8_t head[kShortHead];
        std::memcpy(head, packet, head_bytes);
        return icrc_from(head, head_bytes, packet + head_bytes, nbytes - head_bytes, udp);
    }
    std::vector<std::uint8_t> head(packet, packet + head_bytes);
    return icrc_from(head.data(), head_bytes, packet + head_bytes, nbytes - head_bytes, udp);
}

}  // namespace lastgood::mirror

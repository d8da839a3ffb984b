#include "storage/crc32c.hpp"

#include <array>
#include <cstring>

#include "reflected_crc.hpp"

namespace lastgood {
namespace {

using Crc32c = ReflectedCrc<0x82F63B78u>;

// Copies and sums blocks that stay in the first-level cache between the two.
template <std::uint32_t (*Sum)(const void*, std::size_t, std::uint32_t)>
std::uint32_t copy_in_blocks(void* target, const void* source, std::size_t nbytes, std::uint32_t seed) {
    constexpr std::size_t kBlock = 16 << 10;
    auto* to = static_cast<unsigned char*>(target);
    const auto* from = static_cast<const unsigned char*>(source);
    while (nbytes > 0) {
        const std::size_t step = nbytes < kBlock ? nbytes : kBlock;
        // The copy is what is summed and written: a source that changes meanwhile cannot make the two differ.
        std::memcpy(to, from, step);
        seed = Sum(to, step, seed);
        to += step;
        from += step;
        nbytes -= step;
    }
    return seed;
}

#if defined(__x86_64__)

#define LASTGOOD_SSE42 __attribute__((target("sse4.2,pclmul")))
#define LASTGOOD_AVX512 __attribute__((target("sse4.2,pclmul,avx512f,avx512bw,avx512vl,vpclmulqdq")))

// ---------------------------------------------------------------------------------------------------------------------
// SSE4.2: the crc32 instruction has a latency of three cycles and a throughput of one, so three streams run side by
// side and are joined: crc(A B) = crc(A) * x^(8 |B|) + crc(B).

constexpr std::size_t kLongStream = 4096;
constexpr std::size_t kShortStream = 256;

struct StreamShifts {
    // A carry-less product of two reflected 32-bit values, read as a 64-bit message by the crc32 instruction, is the
    // product times x^33; the constants are smaller by that.
    std::uint32_t long_once = Crc32c::power_of_x(8 * kLongStream - 33);
    std::uint32_t long_twice = Crc32c::power_of_x(16 * kLongStream - 33);
    std::uint32_t short_once = Crc32c::power_of_x(8 * kShortStream - 33);
    std::uint32_t short_twice = Crc32c::power_of_x(16 * kShortStream - 33);
};

const StreamShifts& stream_shifts() {
    static const StreamShifts shifts;
    return shifts;
}

inline std::uint64_t load64(const unsigned char* at) {
    std::uint64_t value;
    std::memcpy(&value, at, sizeof value);
    return value;
}

LASTGOOD_SSE42 inline std::uint32_t shift_crc(std::uint32_t crc, std::uint32_t factor) {
    const __m128i product = _mm_clmulepi64_si128(_mm_cvtsi32_si128(int(crc)), _mm_cvtsi32_si128(int(factor)), 0);
    return std::uint32_t(_mm_crc32_u64(0, std::uint64_t(_mm_cvtsi128_si64(product))));
}

template <std::size_t Stream>
LASTGOOD_SSE42 inline std::uint32_t three_streams(const unsigned char* at, std::uint32_t crc, std::uint32_t once,
                                                  std::uint32_t twice) {
    std::uint64_t first = crc, second = 0, third = 0;
    for (std::size_t offset = 0; offset < Stream; offset += 8) {
        first = _mm_crc32_u64(first, load64(at + offset));
        second = _mm_crc32_u64(second, load64(at + Stream + offset));
        third = _mm_crc32_u64(third, load64(at + 2 * Stream + offset));
    }
    return shift_crc(std::uint32_t(first), twice) ^ shift_crc(std::uint32_t(second), once) ^ std::uint32_t(third);
}

// Takes and returns the register, without the inversions.
LASTGOOD_SSE42 std::uint32_t update_sse42(const unsigned char* at, std::size_t nbytes, std::uint32_t crc) {
    if (nbytes >= 3 * kShortStream) {
        const StreamShifts& shifts = stream_shifts();
        for (; nbytes >= 3 * kLongStream; at += 3 * kLongStream, nbytes -= 3 * kLongStream)
            crc = three_streams<kLongStream>(at, crc, shifts.long_once, shifts.long_twice);
        for (; nbytes >= 3 * kShortStream; at += 3 * kShortStream, nbytes -= 3 * kShortStream)
            crc = three_streams<kShortStream>(at, crc, shifts.short_once, shifts.short_twice);
    }
    std::uint64_t wide = crc;
    for (; nbytes >= 8; at += 8, nbytes -= 8) wide = _mm_crc32_u64(wide, load64(at));
    crc = std::uint32_t(wide);
    for (; nbytes > 0; ++at, --nbytes) crc = _mm_crc32_u8(crc, *at);
    return crc;
}

std::uint32_t sum_sse42(const void* data, std::size_t nbytes, std::uint32_t seed) {
    return ~update_sse42(static_cast<const unsigned char*>(data), nbytes, ~seed);
}

// ---------------------------------------------------------------------------------------------------------------------
// AVX-512 with VPCLMULQDQ: four 64-byte accumulators, each folded forward over 256 bytes by carry-less multiplication.

constexpr std::size_t kFoldBytes = 256;
constexpr std::size_t kCopyThreshold = 16 << 10;

struct AllFactors {
    Crc32c::FoldFactors over_all{8 * kFoldBytes}, over_one{512};
};

const AllFactors& fold_factors() {
    static const AllFactors all;
    return all;
}

// Sums `nbytes` (a multiple of kFoldBytes, not zero) and, with Copy, streams them to `to`, which is 64-byte aligned.
template <bool Copy>
LASTGOOD_AVX512 std::uint32_t fold_blocks(unsigned char* to, const unsigned char* at, std::size_t nbytes,
                                          std::uint32_t crc) {
    const AllFactors& factors = fold_factors();
    const __m512i over_all =
        _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(factors.over_all.words)));
    const __m512i over_one =
        _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(factors.over_one.words)));
    __m512i sum[4];
    for (int lane = 0; lane < 4; ++lane) {
        sum[lane] = _mm512_loadu_si512(at + 64 * lane);
        if (Copy) _mm512_stream_si512(reinterpret_cast<__m512i*>(to + 64 * lane), sum[lane]);
    }
    sum[0] = _mm512_xor_si512(sum[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(int(crc))));
    for (std::size_t offset = kFoldBytes; offset < nbytes; offset += kFoldBytes) {
        for (int lane = 0; lane < 4; ++lane) {
            const __m512i next = _mm512_loadu_si512(at + offset + 64 * lane);
            if (Copy) _mm512_stream_si512(reinterpret_cast<__m512i*>(to + offset + 64 * lane), next);
            sum[lane] = fold_wide(sum[lane], over_all, next);
        }
    }
    for (int lane = 0; lane < 3; ++lane) sum[lane + 1] = fold_wide(sum[lane], over_one, sum[lane + 1]);
    std::uint64_t words[8];
    _mm512_storeu_si512(words, sum[3]);
    std::uint64_t rest = 0;
    for (const std::uint64_t word : words) rest = _mm_crc32_u64(rest, word);
    if (Copy) _mm_sfence();  // streamed stores are seen by the next thread only after a fence
    return std::uint32_t(rest);
}

LASTGOOD_AVX512 std::uint32_t sum_avx512(const void* data, std::size_t nbytes, std::uint32_t seed) {
    const auto* at = static_cast<const unsigned char*>(data);
    std::uint32_t crc = ~seed;
    const std::size_t folded = nbytes & ~(kFoldBytes - 1);
    if (folded > 0) crc = fold_blocks<false>(nullptr, at, folded, crc);
    return ~update_sse42(at + folded, nbytes - folded, crc);
}

LASTGOOD_AVX512 std::uint32_t copy_avx512(void* target, const void* source, std::size_t nbytes, std::uint32_t seed) {
    auto* to = static_cast<unsigned char*>(target);
    const auto* from = static_cast<const unsigned char*>(source);
    if (nbytes < kCopyThreshold) return copy_in_blocks<sum_avx512>(to, from, nbytes, seed);
    const std::size_t head = (64 - reinterpret_cast<std::uintptr_t>(to) % 64) % 64;
    std::memcpy(to, from, head);
    std::uint32_t crc = update_sse42(to, head, ~seed);
    const std::size_t folded = (nbytes - head) & ~(kFoldBytes - 1);
    crc = fold_blocks<true>(to + head, from + head, folded, crc);
    const std::size_t done = head + folded;
    std::memcpy(to + done, from + done, nbytes - done);
    return ~update_sse42(to + done, nbytes - done, crc);
}

#endif

std::vector<Crc32cVariant> detect_variants() {
    std::vector<Crc32cVariant> variants;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool sse42 = __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul");
    if (sse42 && cpu_folds_wide()) variants.push_back({"avx512", sum_avx512, copy_avx512});
    if (sse42) variants.push_back({"sse42", sum_sse42, copy_in_blocks<sum_sse42>});
#endif
    variants.push_back({"portable", Crc32c::sum_portable, copy_in_blocks<Crc32c::sum_portable>});
    return variants;
}

}  // namespace

const std::vector<Crc32cVariant>& crc32c_variants() {
    static const std::vector<Crc32cVariant> variants = detect_variants();
    return variants;
}

const Crc32cVariant& crc32c_variant(const std::string& name) {
    static const Crc32cVariant none{"none", [](const void*, std::size_t, std::uint32_t seed) { return seed; },
                                    [](void* target, const void* source, std::size_t nbytes, std::uint32_t seed) {
                                        std::memcpy(target, source, nbytes);
                                        return seed;
                                    }};
    if (name == none.name) return none;
    return variant_named(crc32c_variants(), name, "CRC32C");
}

std::uint32_t crc32c(const void* data, std::size_t nbytes, std::uint32_t seed) {
    return crc32c_variants().front().sum(data, nbytes, seed);
}

std::uint32_t copy_crc32c(void* target, const void* source, std::size_t nbytes, std::uint32_t seed) {
    return crc32c_variants().front().copy(target, source, nbytes, seed);
}

std::uint32_t chunk_seed(std::uint64_t sequence, std::uint64_t index) {
    std::array<unsigned char, 16> bytes;
    for (int byte = 0; byte < 8; ++byte) {
        bytes[byte] = static_cast<unsigned char>(sequence >> (8 * byte));
        bytes[8 + byte] = static_cast<unsigned char>(index >> (8 * byte));
    }
    return crc32c(bytes.data(), bytes.size(), 0);
}

}  // namespace lastgood

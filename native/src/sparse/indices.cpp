#include "sparse/indices.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace lastgood {
namespace {

constexpr std::uint64_t most_places = std::uint64_t{1} << 32;

// One more than the last bit that `count` indices may set, index j at (index >> low) + j.
std::uint64_t unary_bits(std::uint64_t places, std::uint64_t count, unsigned low) {
    return count + ((places - 1) >> low);
}

std::uint64_t bytes_of(std::uint64_t bits) { return (bits + 7) / 8; }

void set_bit(std::uint8_t* field, std::uint64_t bit) {
    field[bit / 8] = static_cast<std::uint8_t>(field[bit / 8] | (1u << (bit % 8)));
}

template <typename Low>
void write_split(const std::uint32_t* indices, std::uint64_t count, std::uint64_t places, std::uint8_t* target) {
    constexpr unsigned low = 8 * sizeof(Low);
    std::uint8_t* const field = target + sizeof(Low) * count;
    std::memset(field, 0, bytes_of(unary_bits(places, count, low)));
    for (std::uint64_t number = 0; number < count; ++number) {
        const std::uint32_t index = indices[number];
        for (unsigned byte = 0; byte < sizeof(Low); ++byte)
            target[sizeof(Low) * number + byte] = static_cast<std::uint8_t>(index >> (8 * byte));
        set_bit(field, (index >> low) + number);
    }
}

// Calls `take` with the number of each bit that is set in `length` bits; false if it does not want one, or if one is
// set in the last byte beyond them.
template <typename Take>
bool each_bit(const std::uint8_t* field, std::uint64_t length, Take take) {
    const std::uint64_t bytes = bytes_of(length);
    for (std::uint64_t at = 0; at < bytes; at += 8) {
        std::uint64_t word = 0;
        for (std::uint64_t byte = 0; byte < std::min<std::uint64_t>(8, bytes - at); ++byte)
            word |= std::uint64_t{field[at + byte]} << (8 * byte);
        while (word != 0) {
            const std::uint64_t bit = at * 8 + static_cast<unsigned>(__builtin_ctzll(word));
            if (bit >= length || !take(bit)) return false;
            word &= word - 1;
        }
    }
    return true;
}

template <typename Low>
bool read_split(const std::uint8_t* source, std::uint64_t places, std::uint64_t count, std::uint32_t* target) {
    constexpr unsigned low = 8 * sizeof(Low);
    std::uint64_t found = 0;
    const bool good = each_bit(source + sizeof(Low) * count, unary_bits(places, count, low), [&](std::uint64_t bit) {
        if (found == count) return false;
        std::uint32_t index = 0;
        for (unsigned byte = 0; byte < sizeof(Low); ++byte)
            index |= std::uint32_t{source[sizeof(Low) * found + byte]} << (8 * byte);
        target[found] = static_cast<std::uint32_t>((bit - found) << low) | index;
        ++found;
        return true;
    });
    return good && found == count;
}

}  // namespace

std::uint64_t index_bytes(IndexCoding coding, std::uint64_t places, std::uint64_t count) {
    if (places == 0 || places > most_places || count > places) throw std::invalid_argument("indices of no block");
    switch (coding) {
        case IndexCoding::all:
            if (count != places) break;
            return 0;
        case IndexCoding::bits: return bytes_of(places);
        case IndexCoding::low_8: return count + bytes_of(unary_bits(places, count, 8));
        case IndexCoding::low_16: return 2 * count + bytes_of(unary_bits(places, count, 16));
        case IndexCoding::numbers: return 4 * count;
    }
    throw std::invalid_argument("indices in no coding");
}

void write_indices(IndexCoding coding, const std::uint32_t* indices, std::uint64_t count, std::uint64_t places,
                   std::uint8_t* target) {
    for (std::uint64_t number = 0; number < count; ++number)
        if (indices[number] >= places || (number != 0 && indices[number] <= indices[number - 1]))
            throw std::invalid_argument("indices do not ascend, or are beyond the last place");
    switch (coding) {
        case IndexCoding::all: break;
        case IndexCoding::bits:
            std::memset(target, 0, bytes_of(places));
            for (std::uint64_t number = 0; number < count; ++number) set_bit(target, indices[number]);
            break;
        case IndexCoding::low_8: write_split<std::uint8_t>(indices, count, places, target); break;
        case IndexCoding::low_16: write_split<std::uint16_t>(indices, count, places, target); break;
        case IndexCoding::numbers:
            if (count != 0) std::memcpy(target, indices, 4 * count);
            break;
    }
}

bool read_indices(IndexCoding coding, const std::uint8_t* source, std::uint64_t places, std::uint64_t count,
                  std::uint32_t* target) {
    switch (coding) {
        case IndexCoding::all:
            for (std::uint64_t place = 0; place < count; ++place) target[place] = static_cast<std::uint32_t>(place);
            return true;
        case IndexCoding::bits: {
            std::uint64_t found = 0;
            const bool good = each_bit(source, places, [&](std::uint64_t bit) {
                if (found == count) return false;
                target[found++] = static_cast<std::uint32_t>(bit);
                return true;
            });
            return good && found == count;
        }
        case IndexCoding::low_8: return read_split<std::uint8_t>(source, places, count, target);
        case IndexCoding::low_16: return read_split<std::uint16_t>(source, places, count, target);
        case IndexCoding::numbers:
            if (count != 0) std::memcpy(target, source, 4 * count);
            return true;
    }
    return false;
}

}  // namespace lastgood

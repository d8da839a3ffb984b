// The header of a gradient record: docs/wire-format.md, and lastgood.wire.records, which is its plain twin.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace lastgood {

constexpr std::size_t kHeaderBytes = 64;
constexpr std::uint64_t kMaxPayloadBytes = 64 << 20;
// All iterations are below it, so that what is counted on from one fits a signed number as well.
constexpr std::uint64_t kMaxIteration = std::uint64_t(1) << 62;
constexpr std::uint8_t kFinal = 1;

enum class RecordKind : std::uint8_t { gradient = 1, end = 2 };

struct Record {
    RecordKind kind = RecordKind::gradient;
    std::uint8_t flags = 0;
    std::uint64_t job = 0;
    std::uint32_t epoch = 0;
    std::uint32_t rank = 0;
    std::uint64_t iteration = 0;
    std::uint32_t bucket = 0;
    std::uint8_t dtype = 1;
    std::uint64_t offset = 0;
    std::uint32_t length = 0;
    std::uint32_t checksum = 0;
};

// Why a record, or a connection, is refused. Up to and with `damaged_payload` the stream goes on behind the payload;
// the others end the connection.
enum class Cause : std::uint8_t {
    wrong_epoch,
    wrong_rank,
    not_final,
    wrong_bucket,
    wrong_dtype,
    out_of_range,
    old_iteration,
    duplicate,
    overlapping,
    fragmented,
    damaged_payload,
    wrong_job,
    damaged_header,
    unknown_version,
    malformed,
    too_long,
    truncated,
    stalled,
    broken,
    fenced,
    count,
};

const char* cause_name(Cause cause);

// Bytes of one element, or 0 for a dtype that is not known.
std::uint64_t item_bytes(std::uint8_t dtype);

using Header = std::array<unsigned char, kHeaderBytes>;

void pack_header(const Record& record, Header& header);

// Reads a header. Returns Cause::count where it is good, else why no sender of version 1 wrote it.
Cause parse_header(const Header& header, Record& record);

}  // namespace lastgood

// Reads damaged kernel blocks and damaged rings, and passes frames between two threads: for the sanitizers.
#include <linux/if_packet.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "capture/frame_ring.hpp"
#include "capture/packet_blocks.hpp"

using lastgood::Frame;
using lastgood::FrameRing;

namespace {

std::mt19937_64 chance(18);
using Memory = std::unique_ptr<unsigned char, decltype(&std::free)>;

Memory pages(std::size_t size) {
    size = (size + 4095) / 4096 * 4096;
    auto* memory = static_cast<unsigned char*>(std::aligned_alloc(4096, size));
    std::memset(memory, 0, size);
    return {memory, &std::free};
}

// Reads every byte of the frames, as a parser would.
void look(const unsigned char* memory, const std::vector<Frame>& table, std::size_t count) {
    volatile unsigned char all = 0;
    for (std::size_t i = 0; i < count; ++i) {
        for (std::size_t at = 0; at < table[i].captured; ++at) all = all ^ memory[table[i].offset + at];
    }
}

void fill_block(unsigned char* block, std::size_t size) {
    auto* head = reinterpret_cast<tpacket_block_desc*>(block);
    head->hdr.bh1.block_status = TP_STATUS_USER;
    head->hdr.bh1.offset_to_first_pkt = sizeof(tpacket_block_desc);
    std::size_t at = sizeof(tpacket_block_desc);
    for (std::size_t left = chance() % 30; left > 0; --left) {
        const auto captured = static_cast<std::uint32_t>(chance() % 300);
        const auto taken = static_cast<std::uint32_t>((86 + captured + 15) / 16 * 16);
        if (at + taken > size) break;
        tpacket3_hdr frame = {};
        frame.tp_next_offset = taken;
        frame.tp_snaplen = frame.tp_len = captured;
        frame.tp_mac = 86;
        frame.tp_status = chance() % 3 == 0 ? TP_STATUS_VLAN_VALID : 0;
        std::memcpy(block + at, &frame, sizeof frame);
        at += taken;
        ++head->hdr.bh1.num_pkts;
    }
}

void read_blocks() {
    constexpr std::size_t size = 8192;
    const Memory memory = pages(2 * size);
    for (int block = 0; block < 2; ++block) {
        std::memset(memory.get() + block * size, 0, size);
        fill_block(memory.get() + block * size, size);
        for (std::size_t changes = chance() % 4; changes > 0; --changes) {
            const std::size_t at = 12 + chance() % (chance() % 2 == 0 ? 200 : size - 12);
            memory.get()[block * size + at] = static_cast<unsigned char>(chance());
        }
    }
    lastgood::PacketBlocks blocks(memory.get(), size, 2, 1);
    std::vector<Frame> table(64);
    for (int turn = 0; turn < 8; ++turn) {
        look(memory.get(), table, static_cast<std::size_t>(blocks.read(-1, table.data(), 1 + chance() % 64, 0)));
        if (chance() % 2 == 0) blocks.release();
    }
}

void read_ring(unsigned char* memory, std::size_t size, const std::vector<unsigned char>& source) {
    std::memset(memory, 0, lastgood::frame_ring_header_bytes + 16384);
    FrameRing::format(memory, size, 1);
    std::vector<Frame> table(64);
    for (Frame& row : table) {
        row = {chance() % source.size(), static_cast<std::uint32_t>(chance() % (chance() % 20 == 0 ? 200000 : 2000)), 0, 0, 0, 1};
    }
    FrameRing(memory, size, true).write(source.data(), source.size(), table.data(), 30, true);
    for (std::size_t changes = chance() % 5; changes > 0; --changes) {
        const std::size_t at = chance() % 2 == 0 ? chance() % 320 : lastgood::frame_ring_header_bytes + chance() % 8192;
        memory[at] = static_cast<unsigned char>(chance());
    }
    try {
        FrameRing reader(memory, size, false);
        while (const std::size_t count = reader.read(table.data(), table.size(), 0)) look(memory, table, count);
    } catch (const std::exception&) {  // refused
    }
    try {
        FrameRing writer(memory, size, true);
        for (int i = 0; i < 100; ++i) writer.write(source.data(), source.size(), table.data(), table.size(), true);
    } catch (const std::exception&) {
    }
}

bool pass_frames(unsigned char* memory, std::size_t size, std::uint32_t frames) {
    std::memset(memory, 0, size);
    FrameRing::format(memory, size, 1);
    std::thread writing([=] {
        FrameRing writer(memory, size, true);
        std::vector<unsigned char> bytes(3000);
        for (std::uint32_t number = 0; number < frames;) {
            const std::uint32_t length = number * 7919 % 3000;
            std::memset(bytes.data(), static_cast<unsigned char>(number), length);
            const Frame row = {0, length, length, number, 0, 1};
            if (writer.write(bytes.data(), bytes.size(), &row, 1, false) == 1) {
                ++number;
            } else {
                writer.wait_freed(0.1);
            }
        }
        writer.end();
    });
    FrameRing reader(memory, size, false);
    std::vector<Frame> table(64);
    std::uint32_t next = 0;
    bool good = true;
    while (!(reader.ended() && reader.drained())) {
        const std::size_t count = reader.read(table.data(), table.size(), 0.1);
        for (std::size_t i = 0; i < count; ++i, ++next) {
            good = good && table[i].time_ns == next;
            for (std::size_t at = 0; at < table[i].captured; at += 97) {
                good = good && memory[table[i].offset + at] == static_cast<unsigned char>(next);
            }
        }
    }
    writing.join();
    return good && next == frames;
}

}  // namespace

int main() {
    for (int turn = 0; turn < 20000; ++turn) read_blocks();
    const std::size_t size = lastgood::frame_ring_header_bytes + lastgood::frame_ring_least_data_bytes;
    const Memory memory = pages(size);
    const std::vector<unsigned char> source(300000);
    for (int turn = 0; turn < 1000; ++turn) read_ring(memory.get(), size, source);
    if (!pass_frames(memory.get(), size, 100000)) return 1;
    std::puts("done");
    return 0;
}

// Frames out of the ring that an AF_PACKET socket shares with the kernel (TPACKET_V3).
#pragma once

#include <cstddef>
#include <cstdint>

#include "capture/frame.hpp"

namespace lastgood {

// Walks the blocks in order; a frame stays where the kernel put it. VLAN tags are put back in front of it, for which
// the socket must have reserved 4 bytes (PACKET_RESERVE). Nothing outside the blocks is read or written, whatever stands
// in them.
class PacketBlocks {
  public:
    struct Counters {
        std::uint64_t frames = 0;
        std::uint64_t bytes = 0;
        std::uint64_t truncated = 0;
        std::uint64_t no_checksum = 0;
        std::uint64_t vlan_restored = 0;
        std::uint64_t own = 0;
        std::uint64_t damaged_blocks = 0;
    };

    PacketBlocks(unsigned char* memory, std::size_t block_bytes, std::size_t blocks, std::uint32_t link)
        : memory_(memory), block_bytes_(block_bytes), blocks_(blocks), link_(link) {}

    // Fills up to `limit` rows, all of one block, which is the caller's until it is released. Waits for a block at most
    // `timeout_s` on socket `fd` (-1: not at all). 0: there was none, or a signal came; below 0: -errno of the socket.
    long read(int fd, Frame* table, std::size_t limit, double timeout_s);

    // Gives the oldest block that was read to its end back to the kernel. False: there is none.
    bool release();

    // That block's number, below 0 if there is none.
    long oldest() const { return held_ > (open_ ? 1U : 0U) ? static_cast<long>(oldest_) : -1; }

    const Counters& counters() const { return counters_; }

  private:
    bool begin_block();
    void end_block();  // of reading it; it is held on
    std::size_t walk(Frame* table, std::size_t limit);

    unsigned char* memory_;
    std::size_t block_bytes_;
    std::size_t blocks_;
    std::uint32_t link_;
    std::size_t block_ = 0;  // the one that is read, or comes next
    std::size_t oldest_ = 0;
    std::size_t held_ = 0;
    bool open_ = false;
    std::uint32_t left_ = 0;    // frames of it
    std::size_t position_ = 0;  // of the next one's header in it
    Counters counters_;
};

}  // namespace lastgood

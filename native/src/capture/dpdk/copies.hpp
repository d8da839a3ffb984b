// Copies from DPDK's buffers into the ring of frames: by this processor, or by DMA engines (dmadev).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace lastgood {

class Copies {
  public:
    struct Counters {
        std::uint64_t by_dma = 0;
        std::uint64_t by_cpu = 0;
        std::uint64_t queue_full = 0;  // of these, ones that a DMA queue had no room for
        std::uint64_t dma_errors = 0;  // copied again by the processor
    };

    // Takes the first `engines` devices that can copy from memory to memory, and makes the ring known to them. Throws
    // std::runtime_error where there are fewer.
    Copies(unsigned engines, void* ring, std::size_t ring_bytes);
    ~Copies();
    Copies(const Copies&) = delete;
    Copies& operator=(const Copies&) = delete;

    // `source_iova` is the source's address for devices. The bytes are there after `finish`.
    void copy(void* target, const void* source, std::uint64_t source_iova, std::uint32_t nbytes);

    // Waits for all copies; a device that does not end them in time is given up, and its copies are made here.
    void finish();

    const Counters& counters() const { return counters_; }

  private:
    struct Job {
        void* target;
        const void* source;
        std::uint32_t nbytes;
    };
    struct Engine {
        std::int16_t id;
        std::vector<Job> jobs;  // in the order of their submission
        bool lost = false;
    };

    std::vector<Engine> engines_;
    std::size_t next_ = 0;
    Counters counters_;
};

}  // namespace lastgood

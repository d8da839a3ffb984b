#include "sparse/compress_source.hpp"

namespace lastgood {
namespace {

constexpr std::uint64_t kStreamElements = 4 << 20;  // larger ones than a cache are written past it

}  // namespace

bool CompressSource::finite(const float* residual) {
    reads_ += residual == nullptr ? 1 : 2;
    std::atomic<bool> found{true};
    in_all_pieces([&](std::size_t, std::uint64_t begin, std::uint64_t end) {
        alignas(64) float strip[kStripElements];
        for (std::uint64_t at = begin; at < end && found; at += kStripElements) {
            const std::size_t count = std::min<std::uint64_t>(kStripElements, end - at);
            const float* own = strip;
            if (residual == nullptr && type_ == SparseType::float32)
                own = static_cast<const float*>(source_) + at;
            else
                kernels.sum[int(type_)](source_at(at), residual == nullptr ? nullptr : residual + at, strip, count);
            if (kernels.largest(own, count) >= kInfinity) found = false;
        }
    });
    return found;
}

void CompressSource::keep() {
    in_all_pieces([&](std::size_t, std::uint64_t begin, std::uint64_t end) {
        alignas(64) float strip[kStripElements];
        for (std::uint64_t at = begin; at < end; at += kStripElements) {
            const std::size_t count = std::min<std::uint64_t>(kStripElements, end - at);
            kernels.sum[int(type_)](source_at(at), residual_ + at, strip, count);
            keep_strip(at, strip, count);
            std::copy_n(strip, count, order.target + at);
        }
    });
}

bool CompressSource::streams() const {
    return order.target != order.residual && order.elements >= kStreamElements && residual_ != nullptr &&
           type_ == SparseType::float32 && reinterpret_cast<std::uintptr_t>(order.target) % kStreamAlign == 0;
}

}  // namespace lastgood

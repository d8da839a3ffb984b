// What a compressor looks at: gradient and residual at first, then their sum, where it was written; in pieces, on threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>

#include "sparse/compress.hpp"
#include "wire/half_bits.hpp"

namespace lastgood {

class CompressSource {
  public:
    CompressSource(const CompressOrder& order, const CompressKernels& kernels)
        : order(order),
          kernels(kernels),
          width(order.width),
          places((order.elements + order.width - 1) / order.width),
          pieces((order.elements + kPieceElements - 1) / kPieceElements),
          source_(order.gradient),
          type_(order.gradient_type),
          residual_(order.residual) {}

    const CompressOrder& order;
    const CompressKernels& kernels;
    const std::size_t width;
    const std::uint64_t places;
    const std::size_t pieces;
    // Whether all sums were finite so far.
    std::atomic<bool> is_finite{true};

    // Calls work(piece, begin, end) on all threads, in elements; what it throws is thrown here.
    template <class Work>
    void in_all_pieces(Work work) {
        in_pieces({order.elements}, order.threads, [&](std::size_t, std::uint64_t begin, std::uint64_t end) {
            try {
                work(std::size_t(begin / kPieceElements), begin, end);
            } catch (...) {
                const std::lock_guard<std::mutex> lock(failing_);
                if (!failure_) failure_ = std::current_exception();
            }
        });
        if (failure_) std::rethrow_exception(failure_);
    }

    const float* residual() const { return residual_; }
    SparseType type() const { return type_; }
    const float* floats_at(std::uint64_t at) const { return static_cast<const float*>(source_) + at; }

    // The sum has been written to the target, and is what is looked at from now on.
    void is_written() {
        source_ = order.target;
        type_ = SparseType::float32;
        residual_ = nullptr;
    }

    // Sums of [at, at + count), in `strip` or where they are.
    const float* sums(std::uint64_t at, std::size_t count, float* strip) const {
        if (residual_ == nullptr && type_ == SparseType::float32) return static_cast<const float*>(source_) + at;
        kernels.sum[int(type_)](source_at(at), residual_ == nullptr ? nullptr : residual_ + at, strip, count);
        return strip;
    }

    // The same in `strip` in any case.
    const float* copied_sums(std::uint64_t at, std::size_t count, float* strip) const {
        kernels.sum[int(type_)](source_at(at), residual_ == nullptr ? nullptr : residual_ + at, strip, count);
        return strip;
    }

    // Passes over all of it, in tensors as long as the gradient.
    void count_reads() { reads_ += residual_ == nullptr ? 1 : 2; }
    unsigned reads() const { return reads_; }

    bool in_place() const { return order.target != nullptr && order.target == order.residual; }

    // Whether the gradient is finite, or its sum with a residual.
    bool finite(const float* residual);

    // The gradient is finite, and its sum with the residual is not: elsewhere it stays in the residual.
    void keep();

    void keep_strip(std::uint64_t at, float* strip, std::size_t count) const {
        for (std::size_t i = 0; i < count; ++i)
            if ((to_bits(strip[i]) & kMagnitude) >= kInfinity) strip[i] = residual_[at + i];
    }

    // Whether the new residual is written past the caches: it would drive out of them all that is there.
    bool streams() const;

    // Of one place, as its own weight or that of its block.
    Weight weight(std::uint64_t place) const {
        const std::uint64_t at = place * width;
        const std::size_t count = std::min<std::uint64_t>(width, order.elements - at);
        float values[kBlockWidth];
        for (std::size_t i = 0; i < count; ++i) {
            values[i] = widened(source_, type_, at + i);
            if (residual_ != nullptr) values[i] += residual_[at + i];
        }
        return width == 1 ? to_bits(values[0]) & kMagnitude : block_weight(values, count);
    }

    // The memory of a place is on its way into the cache.
    void prefetch(std::uint64_t place) const {
        __builtin_prefetch(source_at(place * width));
        if (residual_ != nullptr) __builtin_prefetch(residual_ + place * width);
    }

  private:
    const void* source_;
    SparseType type_;
    const float* residual_;
    unsigned reads_ = 0;
    std::mutex failing_;
    std::exception_ptr failure_;

    const void* source_at(std::uint64_t at) const {
        return static_cast<const char*>(source_) + at * (type_ == SparseType::float32 ? 4 : 2);
    }
};

}  // namespace lastgood

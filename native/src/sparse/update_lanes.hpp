// Elements on their way through steps of SGD or Adam, gathered from their places. Bodies for sparse/update.cpp, which compiles
// them for each instruction set; each element comes to the same bits in any lane, and in any company.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "optim/arithmetic.hpp"

namespace lastgood {

constexpr std::size_t kLanes = 512;
constexpr std::size_t kGroup = 64;  // lanes whose missed steps are made together

struct Lanes {
    alignas(64) float parameter[kLanes];
    alignas(64) float first[kLanes];
    alignas(64) float second[kLanes];
    alignas(64) float gradient[kLanes];
    alignas(64) std::int32_t made[kLanes];  // how many rows
};

// A row in the parameter's type, rounded where torch's kernels round.
struct SparseRow {
    float decay = 0, factor = 1, momentum = 0, undampened = 0, rate = 0;       // rate: -lr
    float weight1 = 0, beta2 = 0, weight2 = 0, size = 0, correction = 1, eps = 0;  // size: -lr / (1 - beta1^t)
    float sign = 1;
    unsigned kind = 0;
    std::uint64_t kind_end = 0;  // up to this row all are of this kind
    std::uint64_t alike_end = 0;  // up to this row all are the same
};

enum SgdMomentum { kNoMomentum, kMomentum, kNesterov, kFirst, kFirstNesterov };
constexpr unsigned kSgdMomenta = 5;
constexpr unsigned kIdle = 2 * kSgdMomenta;  // without a gradient nothing moves
constexpr unsigned kAdam = kIdle + 1;        // and three more: L2 decay, low beta1

template <bool Decay, SgdMomentum Momentum>
struct SgdStep {
    static constexpr bool kFirstMoment = Momentum != kNoMomentum;
    static constexpr bool kSecondMoment = false;
    static LASTGOOD_INLINE void make(const SparseRow& row, float gradient, float& parameter, float& buffer, float&) {
        if (Decay) gradient = fused(parameter, row.decay, gradient);
        if (Momentum == kMomentum || Momentum == kNesterov)
            buffer = fused(gradient, row.undampened, buffer * row.momentum);
        if (Momentum == kFirst || Momentum == kFirstNesterov) buffer = gradient;
        if (Momentum == kNesterov || Momentum == kFirstNesterov)
            gradient = fused(buffer, row.momentum, gradient);
        else if (Momentum != kNoMomentum)
            gradient = buffer;
        parameter = fused(gradient, row.rate, parameter);
    }
};

// From a weight of one half on torch interpolates from the other end: Low.
template <bool L2, bool Low>
struct AdamStep {
    static constexpr bool kFirstMoment = true;
    static constexpr bool kSecondMoment = true;
    static LASTGOOD_INLINE void make(const SparseRow& row, float gradient, float& parameter, float& first, float& second) {
        if (L2)
            gradient = fused(parameter, row.decay, gradient);
        else
            parameter = parameter * row.factor;
        first = Low ? fused(row.weight1 - 1.0f, gradient - first, gradient) : fused(row.weight1, gradient - first, first);
        second = fused(row.weight2 * gradient, gradient, second * row.beta2);
        parameter = parameter + row.size * first / (root(second) / row.correction + row.eps);
    }
};

// Calls work.run<Step>() for the step of that kind.
template <class Work>
LASTGOOD_INLINE void with_step(unsigned kind, Work work) {
    switch (kind) {
        case kNoMomentum: return work.template run<SgdStep<false, kNoMomentum>>();
        case kMomentum: return work.template run<SgdStep<false, kMomentum>>();
        case kNesterov: return work.template run<SgdStep<false, kNesterov>>();
        case kFirst: return work.template run<SgdStep<false, kFirst>>();
        case kFirstNesterov: return work.template run<SgdStep<false, kFirstNesterov>>();
        case kSgdMomenta + kNoMomentum: return work.template run<SgdStep<true, kNoMomentum>>();
        case kSgdMomenta + kMomentum: return work.template run<SgdStep<true, kMomentum>>();
        case kSgdMomenta + kNesterov: return work.template run<SgdStep<true, kNesterov>>();
        case kSgdMomenta + kFirst: return work.template run<SgdStep<true, kFirst>>();
        case kSgdMomenta + kFirstNesterov: return work.template run<SgdStep<true, kFirstNesterov>>();
        case kIdle: return work.template run<SgdStep<false, kNoMomentum>>();
        case kAdam: return work.template run<AdamStep<false, false>>();
        case kAdam + 1: return work.template run<AdamStep<true, false>>();
        case kAdam + 2: return work.template run<AdamStep<false, true>>();
        case kAdam + 3: return work.template run<AdamStep<true, true>>();
    }
}

// One step of `count` lanes by their gradients.
struct StepOfLanes {
    Lanes& lanes;
    std::size_t count;
    const SparseRow& row;

    template <class Step>
    LASTGOOD_INLINE void run() const {
        const SparseRow own = row;
        for (std::size_t i = 0; i < count; ++i)
            Step::make(own, lanes.gradient[i] * own.sign, lanes.parameter[i], lanes.first[i], lanes.second[i]);
    }
};

// Rows [from, to), all of one kind, of a group of lanes, with gradients of zero. Rows from `all` on are missed by all lanes.
struct MissedOfGroup {
    Lanes& lanes;
    std::size_t at;
    const SparseRow* rows;
    std::uint64_t from;
    std::uint64_t all;
    std::uint64_t to;

    template <class Step>
    LASTGOOD_INLINE void run() const {
        float parameter[kGroup], first[kGroup], second[kGroup];
        std::memcpy(parameter, lanes.parameter + at, sizeof parameter);
        if (Step::kFirstMoment) std::memcpy(first, lanes.first + at, sizeof first);
        if (Step::kSecondMoment) std::memcpy(second, lanes.second + at, sizeof second);
        std::uint64_t number = from;
        for (; number < std::min(all, to); ++number) {
            const SparseRow row = rows[number];
            const float zero = 0.0f * row.sign;
            const std::int32_t due = std::int32_t(number);
            const std::int32_t* made = lanes.made + at;
            for (std::size_t i = 0; i < kGroup; ++i) {
                float p = parameter[i], m = first[i], v = second[i];
                Step::make(row, zero, p, m, v);
                const bool late = made[i] <= due;
                parameter[i] = late ? p : parameter[i];
                if (Step::kFirstMoment) first[i] = late ? m : first[i];
                if (Step::kSecondMoment) second[i] = late ? v : second[i];
            }
        }
        while (number < to) {
            const std::uint64_t end = std::min(to, number + 16);
            for (; number < end; ++number) {
                const SparseRow row = rows[number];
                const float zero = 0.0f * row.sign;
                for (std::size_t i = 0; i < kGroup; ++i) Step::make(row, zero, parameter[i], first[i], second[i]);
            }
            // What one step leaves as it is, a like one does too; and what decays gets slow where it gets denormal.
            if (number < to && rows[number].alike_end > number + 1) {
                const SparseRow row = rows[number];
                const float zero = 0.0f * row.sign;
                unsigned moved = 0;
                for (std::size_t i = 0; i < kGroup; ++i) {
                    float p = parameter[i], m = first[i], v = second[i];
                    Step::make(row, zero, p, m, v);
                    moved |= p != parameter[i];
                    if (Step::kFirstMoment) moved |= m != first[i];
                    if (Step::kSecondMoment) moved |= v != second[i];
                    parameter[i] = p;
                    if (Step::kFirstMoment) first[i] = m;
                    if (Step::kSecondMoment) second[i] = v;
                }
                number = moved ? number + 1 : std::min(to, rows[number].alike_end);
            }
        }
        std::memcpy(lanes.parameter + at, parameter, sizeof parameter);
        if (Step::kFirstMoment) std::memcpy(lanes.first + at, first, sizeof first);
        if (Step::kSecondMoment) std::memcpy(lanes.second + at, second, sizeof second);
    }
};

// All rows below `steps` that each lane missed. Lanes that miss about as many stand together.
LASTGOOD_INLINE void make_missed(Lanes& lanes, std::size_t count, const SparseRow* rows, std::uint64_t steps) {
    for (std::size_t i = count; i % kGroup != 0; ++i) {
        lanes.made[i] = std::int32_t(steps);
        lanes.parameter[i] = lanes.first[i] = lanes.second[i] = 0;
    }
    for (std::size_t at = 0; at < count; at += kGroup) {
        std::int32_t least = std::int32_t(steps), most = 0;
        for (std::size_t i = at; i < at + kGroup; ++i) {
            least = std::min(least, lanes.made[i]);
            most = std::max(most, lanes.made[i]);
        }
        for (std::uint64_t number = std::uint64_t(least); number < steps;) {
            const std::uint64_t end = std::min(steps, rows[number].kind_end);
            if (rows[number].kind != kIdle)
                with_step(rows[number].kind, MissedOfGroup{lanes, at, rows, number, std::uint64_t(most), end});
            number = end;
        }
    }
}

}  // namespace lastgood

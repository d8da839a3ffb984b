#include "wire/windows.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace lastgood {
namespace {

// Separate ranges of one bucket at one iteration: a rank's share of a reduced bucket is one range, so hundreds occur.
constexpr std::uint64_t kMostRanges = 4096;

}  // namespace

Windows::Windows(std::uint32_t epoch, const std::vector<DeclaredBucket>& buckets,
                 const std::vector<std::vector<std::uintptr_t>>& slots)
    : slots_(slots.size()), epoch_(epoch) {
    if (slots.empty()) throw std::invalid_argument("Receiver: at least one slot is needed");
    for (const auto& slot : slots)
        if (slot.size() != buckets.size())
            throw std::invalid_argument("Receiver: a slot has " + std::to_string(slot.size()) + " addresses for " +
                                        std::to_string(buckets.size()) + " buckets");
    for (const DeclaredBucket& declared : buckets) {
        const std::uint64_t item = item_bytes(declared.dtype);
        if (item == 0 || declared.nbytes % item != 0)
            throw std::invalid_argument("Receiver: bucket " + std::to_string(declared.index) + " of dtype " +
                                        std::to_string(declared.dtype) + " and " + std::to_string(declared.nbytes) +
                                        " bytes");
        if (!places_.emplace(declared.index, buckets_.size()).second)
            throw std::invalid_argument("Receiver: bucket " + std::to_string(declared.index) + " is there twice");
        // Records on their way are ranges of their own until they are held, so there may be one for each element.
        const auto ranges = std::size_t(std::min(kMostRanges, declared.nbytes / item));
        Bucket bucket{declared, {}, false, std::nullopt};
        for (const auto& slot : slots)
            bucket.slots.push_back(
                {reinterpret_cast<std::byte*>(slot[buckets_.size()]), Coverage(declared.nbytes, ranges)});
        buckets_.push_back(std::move(bucket));
    }
}

Windows::Verdict Windows::examine(const Record& record, std::uint64_t life, Reservation& reservation, Cause& cause) {
    const auto refuse = [&cause](Cause reason) {
        cause = reason;
        return Verdict::refused;
    };
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
        if (life != life_) return Verdict::fenced;
        if (record.epoch != epoch_) return refuse(Cause::wrong_epoch);
        if (record.kind == RecordKind::end) return Verdict::accepted;
        if ((record.flags & kFinal) == 0) return refuse(Cause::not_final);
        const auto found = places_.find(record.bucket);
        if (found == places_.end()) return refuse(Cause::wrong_bucket);
        Bucket& bucket = buckets_[found->second];
        if (record.dtype != bucket.declared.dtype) return refuse(Cause::wrong_dtype);
        if (record.offset > bucket.declared.nbytes || record.length > bucket.declared.nbytes - record.offset)
            return refuse(Cause::out_of_range);
        if (!bucket.first) bucket.first = std::max(record.iteration, slots_ - 1) - (slots_ - 1);
        if (record.iteration < *bucket.first) return refuse(Cause::old_iteration);
        if (!inside(bucket, record.iteration)) {
            if (bucket.placed) return Verdict::parked;
            move(bucket, record.iteration - (slots_ - 1));
        }
        Slot& slot = slot_of(bucket, record.iteration);
        if (slot.stale_writers > 0) {
            // They are inside one read that does not block, and what is true now may have changed when they leave.
            left_.wait(lock, [&slot] { return slot.stale_writers == 0; });
            continue;
        }
        if (record.length != 0) switch (slot.coverage.reserve(record.offset, record.offset + record.length)) {
                case Coverage::Answer::reserved:
                    break;
                case Coverage::Answer::duplicate:
                    return refuse(Cause::duplicate);
                case Coverage::Answer::overlapping:
                    return refuse(Cause::overlapping);
                case Coverage::Answer::full:
                    return refuse(Cause::fragmented);
            }
        reservation = {found->second,   std::size_t(record.iteration % slots_),
                       slot.generation, record.offset,
                       record.length,   slot.address + record.offset};
        return Verdict::accepted;
    }
}

bool Windows::enter(const Reservation& reservation) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Slot& slot = slot_of(reservation);
    if (slot.generation != reservation.generation) return false;
    ++slot.writers;
    return true;
}

void Windows::leave(const Reservation& reservation) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Slot& slot = slot_of(reservation);
    if (slot.generation == reservation.generation)
        --slot.writers;
    else if (--slot.stale_writers == 0)
        left_.notify_all();
}

Windows::Held Windows::hold(const Reservation& reservation) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Slot& slot = slot_of(reservation);
    if (slot.generation != reservation.generation) return Held::lost;
    if (reservation.nbytes == 0) return Held::more;
    slot.coverage.hold(reservation.begin);
    return slot.coverage.complete() ? Held::complete : Held::more;
}

void Windows::release(const Reservation& reservation) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Slot& slot = slot_of(reservation);
    if (slot.generation == reservation.generation && reservation.nbytes != 0) slot.coverage.release(reservation.begin);
}

std::uint64_t Windows::life() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return life_;
}

std::uint32_t Windows::epoch() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return epoch_;
}

void Windows::advance(std::uint64_t first) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (Bucket& bucket : buckets_)
        if (bucket.placed && first > *bucket.first) move(bucket, first);
}

bool Windows::set_first(std::uint32_t index, std::uint64_t first) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Bucket& bucket = buckets_[place_of(index)];
    if (bucket.first && first < *bucket.first) return false;
    if (bucket.first)
        move(bucket, first);
    else
        bucket.first = first;
    bucket.placed = true;
    return true;
}

void Windows::reset(std::uint32_t index) {
    const std::lock_guard<std::mutex> lock(mutex_);
    buckets_[place_of(index)].placed = false;
}

void Windows::begin(std::uint32_t epoch, bool keep) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (epoch < epoch_)
        throw std::invalid_argument("Receiver: epoch " + std::to_string(epoch) + " after epoch " +
                                    std::to_string(epoch_));
    epoch_ = epoch;
    ++life_;
    for (Bucket& bucket : buckets_) {
        for (Slot& slot : bucket.slots)
            if (!keep || !slot.coverage.complete()) clear(slot);
        if (keep) continue;
        bucket.placed = false;
        bucket.first.reset();
    }
}

std::optional<std::uint64_t> Windows::first(std::uint32_t index) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return buckets_[place_of(index)].first;
}

bool Windows::complete(std::uint32_t index, std::uint64_t iteration) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const Bucket& bucket = buckets_[place_of(index)];
    return inside(bucket, iteration) && slot_of(bucket, iteration).coverage.complete();
}

std::map<std::uint32_t, Windows::Ranges> Windows::missing(std::uint64_t iteration) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::map<std::uint32_t, Ranges> found;
    for (const Bucket& bucket : buckets_) {
        if (bucket.placed && iteration < *bucket.first) continue;
        Ranges ranges;
        if (inside(bucket, iteration))
            ranges = slot_of(bucket, iteration).coverage.missing();
        else if (bucket.declared.nbytes != 0)
            ranges = {{0, bucket.declared.nbytes}};
        if (!ranges.empty()) found.emplace(bucket.declared.index, std::move(ranges));
    }
    return found;
}

std::size_t Windows::place_of(std::uint32_t bucket) const {
    const auto found = places_.find(bucket);
    if (found == places_.end())
        throw std::invalid_argument("Receiver: bucket " + std::to_string(bucket) + " is not one of its own");
    return found->second;
}

void Windows::move(Bucket& bucket, std::uint64_t first) {
    const std::uint64_t passed = std::min(first - *bucket.first, slots_);
    for (std::uint64_t number = 0; number < passed; ++number) clear(slot_of(bucket, *bucket.first + number));
    bucket.first = first;
}

void Windows::clear(Slot& slot) {
    ++slot.generation;
    slot.stale_writers += slot.writers;
    slot.writers = 0;
    slot.coverage.clear();
}

}  // namespace lastgood

// The iterations that a receiver can hold, bucket by bucket, and who may write where in their memory.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "wire/coverage.hpp"
#include "wire/record.hpp"

namespace lastgood {

struct DeclaredBucket {
    std::uint32_t index;
    std::uint64_t nbytes;
    std::uint8_t dtype;
};

// A range of a slot that one record may write, until it is held or released, or its slot is cleared.
struct Reservation {
    std::size_t bucket = 0;  // its place among the owned ones
    std::size_t slot = 0;
    std::uint64_t generation = 0;
    std::uint64_t begin = 0;
    std::uint64_t nbytes = 0;
    std::byte* address = nullptr;
};

// Iteration i of a bucket lies in slot i mod slots. A bucket's window is `slots` iterations long. Once set_first() has
// placed it, only advance() and set_first() move it, and records beyond it wait. Before, the window of a bucket floats:
// a record beyond it moves it along, and what was in its oldest slots is forgotten.
class Windows {
  public:
    using Ranges = std::vector<std::pair<std::uint64_t, std::uint64_t>>;

    // `slots[s][b]` is the address of bucket b's memory in slot s, in the order of `buckets`.
    Windows(std::uint32_t epoch, const std::vector<DeclaredBucket>& buckets,
            const std::vector<std::vector<std::uintptr_t>>& slots);

    // -- for threads that receive ------------------------------------------------------------------------------------

    enum class Verdict { accepted, parked, refused, fenced };

    // What becomes of a record of a connection of life `life`, by its header. Accepted gradients have `reservation`.
    Verdict examine(const Record& record, std::uint64_t life, Reservation& reservation, Cause& cause);
    // Whether the range may be written now; if so, leave() must follow.
    bool enter(const Reservation& reservation);
    void leave(const Reservation& reservation);

    enum class Held { more, complete, lost };
    // The payload has arrived, whole: whether its bucket is complete with it, or its slot was cleared meanwhile.
    Held hold(const Reservation& reservation);
    void release(const Reservation& reservation);

    // -- for the caller ----------------------------------------------------------------------------------------------

    std::uint64_t life() const;
    std::uint32_t epoch() const;
    // Moves all placed windows forward to begin at `first`; those that are there already stay.
    void advance(std::uint64_t first);
    // Places a bucket's window. False, and nothing is changed, where iterations from `first` on may be forgotten.
    bool set_first(std::uint32_t bucket, std::uint64_t first);
    // Lets a bucket's window float from where it is.
    void reset(std::uint32_t bucket);
    // A new life: older connections' records are refused. Keeps complete iterations, or nothing and no window.
    void begin(std::uint32_t epoch, bool keep);
    std::optional<std::uint64_t> first(std::uint32_t bucket) const;
    bool complete(std::uint32_t bucket, std::uint64_t iteration) const;
    // Of all owned buckets that lack something of an iteration that their windows are not past. A floating window is
    // past nothing: what it has forgotten is missing.
    std::map<std::uint32_t, Ranges> missing(std::uint64_t iteration) const;

  private:
    struct Slot {
        std::byte* address;
        Coverage coverage;
        std::uint64_t generation = 0;
        unsigned writers = 0;        // that are between enter() and leave()
        unsigned stale_writers = 0;  // the same, of before it was cleared
    };

    struct Bucket {
        DeclaredBucket declared;
        std::vector<Slot> slots;
        bool placed = false;
        std::optional<std::uint64_t> first;  // absent: floating, and nothing has come
    };

    Slot& slot_of(Bucket& bucket, std::uint64_t iteration) const { return bucket.slots[iteration % slots_]; }
    const Slot& slot_of(const Bucket& bucket, std::uint64_t iteration) const {
        return bucket.slots[iteration % slots_];
    }
    Slot& slot_of(const Reservation& reservation) { return buckets_[reservation.bucket].slots[reservation.slot]; }
    bool inside(const Bucket& bucket, std::uint64_t iteration) const {
        return bucket.first && iteration >= *bucket.first && iteration - *bucket.first < slots_;
    }
    std::size_t place_of(std::uint32_t bucket) const;
    void move(Bucket& bucket, std::uint64_t first);
    static void clear(Slot& slot);

    const std::uint64_t slots_;
    mutable std::mutex mutex_;
    std::condition_variable left_;
    std::vector<Bucket> buckets_;
    std::unordered_map<std::uint32_t, std::size_t> places_;
    std::uint32_t epoch_;
    std::uint64_t life_ = 0;
};

}  // namespace lastgood

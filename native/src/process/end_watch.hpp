// Ends a process that SIGTERM asked to end, and whose main thread does not come to Python's handler.
#pragma once

namespace lastgood {

// CPython's own handler only sets a flag; the main thread acts on it between two instructions, which it never reaches
// while it sits in a collective or another long call into native code. Here a handler in front of it also wakes a
// thread that needs no lock of the interpreter's. That thread waits for `end_watch_answered`, for `patience_s` at most.
// Without an answer it writes to a descriptor, which another thread of Python reads (and makes durable what it can);
// when that one says `end_watch_done`, and `limit_s` after the signal at the latest, the process ends as by SIGTERM's
// default action.

// To be called in the main thread, behind whatever sets Python's handler of SIGTERM; again in a forked child that
// wants this for itself. Returns the descriptor to read from. Throws std::system_error.
int end_watch_begin();

// Times in seconds, both from the signal on.
void end_watch_limits(double patience_s, double limit_s);

// The main thread has come to Python's handler, and ends the process in its own way. Does nothing in a forked child.
void end_watch_answered();

// What the descriptor's reader could do is done.
void end_watch_done();

// Puts the former handler back, unless somebody else's is there now. Safe to call twice.
void end_watch_stop();

}  // namespace lastgood

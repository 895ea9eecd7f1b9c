// SPDX-License-Identifier: Apache-2.0
// The Python lines that a thread is in. Python is not linked: its functions are found in the process, if it
// has any.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace shardplan::softdevice {

// A code object and the line in it. Code objects that were seen are kept, so that none has another's address.
using PythonFrame = std::pair<const void*, int>;

struct PythonCode {
  std::string file;
  std::string function;
};

// Whether this thread can ask for its frames, and holds the interpreter's lock now.
bool HoldsPythonsLock();
// Innermost first; at most so many. Empty: this thread has never run Python. Takes the interpreter's lock:
// nobody may call it with a lock that a thread wants which holds that one.
std::vector<PythonFrame> FramesOfThread();
PythonCode CodeOf(const void* code);

}  // namespace shardplan::softdevice

// SPDX-License-Identifier: Apache-2.0
// The lock of the language that the model is written in: Python's GIL. A model in C++ has none.
#pragma once

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace shardplan::executor {

class UserLock {
 public:
  virtual ~UserLock() = default;
  // Takes the lock, held or not; Release gives back what Acquire returned.
  virtual int Acquire() = 0;
  virtual void Release(int acquired) = 0;
  // Lets go of it, if this thread holds it; TakeAgain gives back what LetGo returned.
  virtual void* LetGo() = 0;
  virtual void TakeAgain(void* held) = 0;
};

// For a callback of the replayer, which runs without the lock. Here and below, null: there is none.
class HoldLock {
 public:
  explicit HoldLock(UserLock* lock) : lock_(lock), acquired_(lock != nullptr ? lock->Acquire() : 0) {}
  ~HoldLock() {
    if (lock_ != nullptr) lock_->Release(acquired_);
  }
  HoldLock(const HoldLock&) = delete;
  HoldLock& operator=(const HoldLock&) = delete;

 private:
  UserLock* const lock_;
  const int acquired_;
};

// While the replayer may block on other ranks.
class ReleaseLock {
 public:
  explicit ReleaseLock(UserLock* lock) : lock_(lock), held_(lock != nullptr ? lock->LetGo() : nullptr) {}
  ~ReleaseLock() {
    if (lock_ != nullptr) lock_->TakeAgain(held_);
  }
  ReleaseLock(const ReleaseLock&) = delete;
  ReleaseLock& operator=(const ReleaseLock&) = delete;

 private:
  UserLock* const lock_;
  void* const held_;
};

// For the user's code inside a trigger, which runs without the lock and below autograd: the lock, every
// dispatch key, no gradients recorded.
class InsideUserCode {
 public:
  explicit InsideUserCode(UserLock* lock)
      : lock_(lock), keys_(c10::impl::LocalDispatchKeySet(c10::impl::PODLocalDispatchKeySet{})) {}

 private:
  HoldLock lock_;
  c10::impl::ForceDispatchKeyGuard keys_;
  at::NoGradGuard no_grad_;
};

}  // namespace shardplan::executor

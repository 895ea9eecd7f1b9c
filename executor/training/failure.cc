// SPDX-License-Identifier: Apache-2.0
#include "training/failure.h"

#include <c10/util/Exception.h>

namespace shardplan::executor {

void Throw(const Error& error) { throw TrainingError(error.code, ToString(error)); }

void OrThrow(const Status& status) {
  if (!status) Throw(status.error());
}

void ThrowFailure(const Error& error, const std::exception_ptr& thrown) {
  if (thrown) {
    try {
      std::rethrow_exception(thrown);
    } catch (const c10::OutOfMemoryError&) {
      throw c10::OutOfMemoryError({__func__, __FILE__, __LINE__}, "shardplan: " + ToString(error));
    } catch (const std::exception&) {
      // The error has its message.
    }
  }
  Throw(error);
}

}  // namespace shardplan::executor

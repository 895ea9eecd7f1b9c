// SPDX-License-Identifier: Apache-2.0
// The runtime of the device in software: memory, streams, events, errors, in both modes.
#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <string>
#include <vector>

#include "device/runtime/software_device.h"
#include "tests/executor/forked_ranks.h"

// The functions that the compiler's code for kernels calls.
extern "C" void __cudaRegisterFunction(void**, const char*, char*, const char*, int, uint3*, uint3*, dim3*,
                                       dim3*, int*);

namespace shardplan::test {
namespace {

constexpr int kPatienceSeconds = 20;
constexpr int kSeeds = 24;

// The device reads its mode once, so each mode is a process.
std::vector<std::string> InMode(const std::string& mode, const std::function<void(const Log&)>& work) {
  const ForkedRun run = RunForked(1, kPatienceSeconds, [&](std::int64_t, const Log& log) {
    (void)setenv("SHARDPLAN_DEVICE_MODE", mode.c_str(), 1);
    (void)setenv("SHARDPLAN_DEVICE_BYTES", std::to_string(64 << 20).c_str(), 1);
    work(log);
    return true;
  });
  EXPECT_THAT(run.faults, testing::IsEmpty()) << mode;
  return run.lines;
}

class Runtime : public testing::TestWithParam<std::string> {
 protected:
  std::vector<std::string> Run(const std::function<void(const Log&)>& work) const {
    return InMode(GetParam(), work);
  }
};

cudaStream_t MakeStream() {
  cudaStream_t stream = nullptr;
  (void)cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  return stream;
}
cudaEvent_t MakeEvent() {
  cudaEvent_t event = nullptr;
  (void)cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
  return event;
}
int* MakePinned(int count) {
  void* memory = nullptr;
  (void)cudaHostAlloc(&memory, sizeof(int) * static_cast<std::size_t>(count), 0);
  return static_cast<int*>(memory);
}
int* MakeInts(int count) {
  void* memory = nullptr;
  (void)cudaMalloc(&memory, sizeof(int) * static_cast<std::size_t>(count));
  return static_cast<int*>(memory);
}
void Expect(const Log& log, bool holds, const std::string& what) {
  if (!holds) log("not so: " + what);
}

TEST_P(Runtime, AStreamDoesItsWorkInOrder) {
  EXPECT_THAT(Run([](const Log& log) {
                cudaStream_t stream = MakeStream();
                std::vector<int> order;
                for (int i = 0; i < 100; ++i) {
                  softdevice::EnqueueKernel(stream, "push", [&order, i] { order.push_back(i); });
                }
                (void)cudaStreamSynchronize(stream);
                for (int i = 0; i < 100; ++i) Expect(log, order[i] == i, fmt::format("work {}", i));
              }),
              testing::IsEmpty());
}

TEST_P(Runtime, AWaitOrdersTwoStreams) {
  EXPECT_THAT(Run([](const Log& log) {
                cudaStream_t first = MakeStream();
                cudaStream_t second = MakeStream();
                cudaEvent_t event = MakeEvent();
                int* memory = MakeInts(1);
                int* found = MakePinned(1);
                for (int i = 1; i <= 200; ++i) {
                  softdevice::EnqueueKernel(first, "write", [=] { *memory = i; });
                  (void)cudaEventRecord(event, first);
                  (void)cudaStreamWaitEvent(second, event, 0);
                  (void)cudaMemcpyAsync(found, memory, sizeof(int), cudaMemcpyDeviceToHost, second);
                  (void)cudaEventRecord(event, second);
                  (void)cudaStreamWaitEvent(first, event, 0);
                  if (i % 7 == 0) {
                    (void)cudaEventSynchronize(event);
                    Expect(log, *found == i, fmt::format("{} is {}", i, *found));
                  }
                }
              }),
              testing::IsEmpty());
}

TEST_P(Runtime, AnEventIsWhatItWasWhenItWasWaitedFor) {
  EXPECT_THAT(Run([](const Log& log) {
                cudaStream_t first = MakeStream();
                cudaEvent_t event = MakeEvent();
                Expect(log, cudaEventQuery(event) == cudaSuccess, "never recorded: reached");
                Expect(log, cudaStreamWaitEvent(first, event, 0) == cudaSuccess, "and waited for");
                std::atomic<int> done = 0;
                softdevice::EnqueueKernel(first, "one", [&] { ++done; });
                (void)cudaEventRecord(event, first);
                softdevice::EnqueueKernel(first, "two", [&] { ++done; });
                (void)cudaEventSynchronize(event);
                Expect(log, done >= 1, "what is before the record is done");
                Expect(log, cudaEventQuery(event) == cudaSuccess, "reached");
                (void)cudaDeviceSynchronize();
                Expect(log, done == 2, "all is done");
              }),
              testing::IsEmpty());
}

TEST_P(Runtime, PageableMemoryIsStagedAndPinnedMemoryIsNot) {
  EXPECT_THAT(Run([](const Log& log) {
                cudaStream_t stream = MakeStream();
                int* memory = MakeInts(1);
                int pageable = 7;
                (void)cudaMemcpyAsync(memory, &pageable, sizeof(int), cudaMemcpyHostToDevice, stream);
                pageable = 8;
                int found = 0;
                (void)cudaMemcpyAsync(&found, memory, sizeof(int), cudaMemcpyDeviceToHost, stream);
                Expect(log, found == 7, "there when the call returns");
                int* pinned = MakePinned(2);
                pinned[0] = 9;
                (void)cudaMemcpyAsync(memory, pinned, sizeof(int), cudaMemcpyHostToDevice, stream);
                (void)cudaMemcpyAsync(pinned + 1, memory, sizeof(int), cudaMemcpyDeviceToHost, stream);
                (void)cudaStreamSynchronize(stream);
                Expect(log, pinned[1] == 9, "there when the stream is done");
              }),
              testing::IsEmpty());
}

TEST_P(Runtime, MistakesAreErrors) {
  EXPECT_THAT(
      Run([](const Log& log) {
        int* memory = MakeInts(16);
        int host = 0;
        const auto is = [&](cudaError_t found, cudaError_t expected, const char* what) {
          Expect(log, found == expected, fmt::format("{}: {}", what, cudaGetErrorString(found)));
        };
        is(cudaMemcpy(memory, &host, 65, cudaMemcpyHostToDevice), cudaErrorInvalidValue, "beyond the end");
        is(cudaMemcpy(&host, &host, 4, cudaMemcpyHostToDevice), cudaErrorInvalidValue, "not to the device");
        is(cudaMemset(&host, 0, 4), cudaErrorInvalidValue, "memset of the host's memory");
        is(cudaFree(memory), cudaSuccess, "free");
        is(cudaFree(memory), cudaErrorInvalidValue, "free once more");
        void* large = nullptr;
        is(cudaMalloc(&large, 65 << 20), cudaErrorMemoryAllocation, "more than there is");
        is(cudaMalloc(&large, 64 << 20), cudaSuccess, "all there is");
        cudaStream_t stream = MakeStream();
        is(cudaStreamDestroy(stream), cudaSuccess, "destroy");
        is(cudaStreamSynchronize(stream), cudaErrorInvalidResourceHandle, "a stream that is gone");
        cudaEvent_t event = MakeEvent();
        is(cudaSetDevice(1), cudaSuccess, "another device");
        is(cudaEventRecord(event, nullptr), cudaErrorInvalidResourceHandle, "an event of another device");
        is(cudaSetDevice(8), cudaErrorInvalidDevice, "no such device");
        is(cudaEventDestroy(event), cudaSuccess, "destroy");
        is(cudaEventQuery(event), cudaErrorInvalidResourceHandle, "an event that is gone");
      }),
      testing::IsEmpty());
}

TEST_P(Runtime, AKernelThatNobodyReplacedIsNamed) {
  EXPECT_THAT(
      Run([](const Log& log) {
        static const char stub = 0;
        __cudaRegisterFunction(nullptr, &stub, nullptr, "_Z3addPfS_", 0, nullptr, nullptr, nullptr, nullptr,
                               nullptr);
        const cudaError_t error = cudaLaunchKernel(&stub, {}, {}, nullptr, 0, nullptr);
        log(cudaGetErrorString(error));
        log(cudaGetErrorName(cudaGetLastError()));
      }),
      testing::ElementsAre(testing::HasSubstr("add(float*, float*)"), "cudaErrorInvalidDeviceFunction"));
}

TEST_P(Runtime, WorkThatFailsBreaksTheDeviceForGood) {
  EXPECT_THAT(Run([](const Log& log) {
                cudaStream_t stream = MakeStream();
                bool later = false;
                softdevice::EnqueueKernel(stream, "index", [] { throw std::runtime_error("out of range"); });
                softdevice::EnqueueKernel(stream, "later", [&] { later = true; });
                log(cudaGetErrorString(cudaStreamSynchronize(stream)));
                Expect(log, !later, "nothing runs on a broken device");
                Expect(log, cudaDeviceSynchronize() == cudaErrorLaunchFailure, "the error stays");
              }),
              testing::ElementsAre(testing::HasSubstr("index: out of range")));
}

TEST_P(Runtime, FreshMemoryIsPoison) {
  EXPECT_THAT(Run([](const Log& log) {
                const int* memory = MakeInts(4);
                int found = 0;
                (void)cudaMemcpy(&found, memory + 3, sizeof(int), cudaMemcpyDeviceToHost);
                Expect(log, found == -1, fmt::format("{}", found));
              }),
              testing::IsEmpty());
}

INSTANTIATE_TEST_SUITE_P(Modes, Runtime,
                         testing::Values("inline", "lazy:1", "lazy:2", "lazy:3", "late:0", "late:1"),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::erase(name, ':');
                           return name;
                         });

// The lazy mode is for this: of the two orders that the host left open, some seed takes each.
TEST(LazyDevice, ALostWaitIsSeen) {
  int stale = 0;
  int fresh = 0;
  for (int seed = 0; seed < kSeeds; ++seed) {
    const auto lines = InMode(fmt::format("lazy:{}", seed), [](const Log& log) {
      cudaStream_t first = MakeStream();
      cudaStream_t second = MakeStream();
      int* memory = MakeInts(1);
      int* found = MakePinned(1);
      softdevice::EnqueueKernel(first, "write", [=] { *memory = 5; });
      (void)cudaMemcpyAsync(found, memory, sizeof(int), cudaMemcpyDeviceToHost, second);
      (void)cudaStreamSynchronize(second);
      log(std::to_string(*found));
    });
    ASSERT_EQ(lines.size(), 1U);
    (lines[0] == "5" ? fresh : stale) += 1;
  }
  EXPECT_GT(stale, 0);
  EXPECT_GT(fresh, 0);
}

// late:1: the first stream that is made does what somebody waits for, and nothing before.
TEST(LateDevice, AStreamDoesWhatIsWaitedForAlone) {
  const auto lines = InMode("late:1", [](const Log& log) {
    std::string order;
    cudaStream_t late = MakeStream();
    cudaStream_t other = MakeStream();
    const auto work = [&order](cudaStream_t stream, char letter) {
      softdevice::EnqueueKernel(stream, "letter", [&order, letter] { order += letter; });
    };
    work(late, 'a');
    cudaEvent_t event = MakeEvent();
    (void)cudaEventRecord(event, late);
    work(late, 'b');
    work(other, 'c');
    log(order);
    (void)cudaStreamWaitEvent(other, event);
    work(other, 'd');
    log(order);
    (void)cudaStreamSynchronize(other);
    log(order);
    while (cudaStreamQuery(late) == cudaErrorNotReady) {  // a host that asks in a loop waits
    }
    log(order);
  });
  EXPECT_THAT(lines, testing::ElementsAre("c", "c", "cad", "cadb"));
}

TEST(LazyDevice, NothingRunsBeforeSomebodyWaits) {
  const auto lines = InMode("lazy:1", [](const Log& log) {
    std::atomic<bool> done = false;
    cudaStream_t stream = MakeStream();
    softdevice::EnqueueKernel(stream, "work", [&] { done = true; });
    log(done ? "done" : "not yet");
    Expect(log, cudaStreamQuery(stream) == cudaErrorNotReady || done, "a query makes nothing run");
    while (cudaStreamQuery(stream) == cudaErrorNotReady) {  // but an idle host sees it done at some time
    }
    log(done ? "done" : "not yet");
  });
  EXPECT_THAT(lines, testing::ElementsAre("not yet", "done"));
}

TEST(LazyDevice, OneSeedIsOneOrder) {
  const auto order = [](int seed) {
    return InMode(fmt::format("lazy:{}", seed), [](const Log& log) {
      std::string order;
      std::vector<cudaStream_t> streams;
      for (int s = 0; s < 4; ++s) streams.push_back(MakeStream());
      for (int i = 0; i < 40; ++i) {
        softdevice::EnqueueKernel(streams[i % 4], "letter",
                                  [&order, i] { order += static_cast<char>('a' + i % 4); });
      }
      (void)cudaDeviceSynchronize();
      log(order);
    });
  };
  EXPECT_EQ(order(3), order(3));
  EXPECT_NE(order(3), order(4));
}

}  // namespace
}  // namespace shardplan::test

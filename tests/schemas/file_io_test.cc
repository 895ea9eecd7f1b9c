// SPDX-License-Identifier: Apache-2.0
// Files are written whole or not at all.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "shardplan/schemas/io.h"
#include "tests/support/random_documents.h"

namespace shardplan {
namespace {

using ::testing::HasSubstr;

class FileIo : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = ::testing::TempDir() + "/shardplan-file-io-XXXXXX";
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string Path(const std::string& name) const { return folder_ / name; }
  std::size_t FilesInFolder() const {
    return static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator(folder_), {}));
  }

  std::filesystem::path folder_;
};

TEST_F(FileIo, WritesAndReadsBack) {
  const std::string bytes = std::string("a\0b\n", 4) + std::string(300'000, 'x');
  ASSERT_TRUE(WriteFileAtomically(Path("f"), bytes).has_value());
  EXPECT_EQ(ReadFile(Path("f")), bytes);
  ASSERT_TRUE(WriteFileAtomically(Path("f"), "short").has_value());
  EXPECT_EQ(ReadFile(Path("f")), "short");
  EXPECT_EQ(FilesInFolder(), 1U);
}

TEST_F(FileIo, MissingFolder) {
  const Status status = WriteFileAtomically(Path("no/such/folder/f"), "x");
  ASSERT_FALSE(status.has_value());
  EXPECT_EQ(status.error().code, ErrorCode::kEnvironment);
  EXPECT_THAT(ToString(status.error()), HasSubstr("No such file or directory"));
  EXPECT_EQ(status.error().file, Path("no/such/folder/f"));
}

TEST_F(FileIo, FullDevice) {
  const Status status = WriteFileAtomically("/dev/full", "x");
  ASSERT_FALSE(status.has_value());
  EXPECT_EQ(status.error().code, ErrorCode::kEnvironment);
  EXPECT_THAT(status.error().message, HasSubstr("No space left"));
}

// A file size limit stands for a disk that fills up in the middle of the file.
TEST_F(FileIo, ADiskThatFillsUpLeavesTheOldBytes) {
  ASSERT_TRUE(WriteFileAtomically(Path("f"), "old").has_value());
  struct rlimit before = {};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  struct rlimit small = before;
  small.rlim_cur = 4096;
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const Status status = WriteFileAtomically(Path("f"), std::string(100'000, 'n'));
  ::setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  ASSERT_FALSE(status.has_value());
  EXPECT_EQ(status.error().code, ErrorCode::kEnvironment);
  EXPECT_EQ(ReadFile(Path("f")), "old");
  EXPECT_EQ(FilesInFolder(), 1U) << "a temporary file is left behind";
}

TEST_F(FileIo, ALinkStaysALink) {
  ASSERT_TRUE(WriteFileAtomically(Path("target"), "old").has_value());
  std::filesystem::create_symlink("target", Path("link"));
  ASSERT_TRUE(WriteFileAtomically(Path("link"), "new").has_value());
  EXPECT_TRUE(std::filesystem::is_symlink(Path("link")));
  EXPECT_EQ(ReadFile(Path("target")), "new");
}

TEST_F(FileIo, TheTargetIsWhatAWriteReplaces) {
  std::filesystem::create_directory(Path("folder"));
  std::filesystem::create_symlink("folder/made", Path("link"));
  const auto folder = std::filesystem::canonical(Path("folder"));
  EXPECT_EQ(WritableTarget(Path("link")), folder / "made");
  EXPECT_EQ(WritableTarget(Path("folder/../folder/made")), folder / "made");
  std::filesystem::create_symlink("loop", Path("loop"));
  for (const std::string& path : {Path("loop"), Path("folder"), Path("folder/"), Path("no/made"),
                                  Path(std::string(300, 'n')), std::string()}) {
    const Result<std::string> target = WritableTarget(path);
    ASSERT_FALSE(target.has_value()) << path;
    EXPECT_EQ(target.error().code, ErrorCode::kEnvironment);
    const Status written = WriteFileAtomically(path, "x");
    ASSERT_FALSE(written.has_value()) << path;
    EXPECT_EQ(written.error(), target.error());
  }
}

TEST_F(FileIo, TheModeStaysAndReadOnlyFilesDo) {
  ASSERT_TRUE(WriteFileAtomically(Path("f"), "old").has_value());
  std::filesystem::permissions(Path("f"), std::filesystem::perms{0751});
  ASSERT_TRUE(WriteFileAtomically(Path("f"), "new").has_value());
  EXPECT_EQ(std::filesystem::status(Path("f")).permissions(), std::filesystem::perms{0751});
  std::filesystem::permissions(Path("f"), std::filesystem::perms{0444});
  if (::geteuid() == 0) return;  // root may write it
  EXPECT_FALSE(WriteFileAtomically(Path("f"), "newer").has_value());
  EXPECT_EQ(ReadFile(Path("f")), "new");
}

TEST_F(FileIo, ReadErrorsNameTheFile) {
  const Result<std::string> missing = ReadFile(Path("none"));
  ASSERT_FALSE(missing.has_value());
  EXPECT_EQ(missing.error().code, ErrorCode::kBadInput);
  EXPECT_EQ(missing.error().file, Path("none"));
  EXPECT_FALSE(ReadFile(folder_).has_value());

  std::string text = ToJson(test::RandomTrace(1));
  text.resize(text.size() / 2);
  ASSERT_TRUE(WriteFileAtomically(Path("half.json"), text).has_value());
  for (const std::string& message :
       {ToString(ReadTrace(Path("half.json")).error()), ToString(ReadDocument(Path("half.json")).error())}) {
    EXPECT_THAT(message, HasSubstr(Path("half.json") + ": line "));
    EXPECT_THAT(message, HasSubstr("truncated"));
  }
}

}  // namespace
}  // namespace shardplan

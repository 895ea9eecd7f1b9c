// SPDX-License-Identifier: Apache-2.0
// Names on a terminal.
#include "shardplan/schemas/printable.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <random>
#include <string>
#include <utility>

#include "shardplan/schemas/error.h"

namespace shardplan {
namespace {

TEST(Printable, OrdinaryTextStays) {
  for (const char* text :
       {"", "layers.0.weight", "\xc3\xa4\xe2\x82\xac\xf0\x9f\x98\x80", "a \\n b", "\"quoted\" <b>"}) {
    EXPECT_EQ(Printable(text), text);
    EXPECT_TRUE(IsUtf8(text));
  }
}

TEST(Printable, HiddenCharactersAreEscapes) {
  EXPECT_EQ(Printable("a\nb\tc\rd"), "a\\nb\\tc\\rd");
  EXPECT_EQ(PrintableLines("a\nb\tc\rd"), "a\nb\tc\\rd");
  EXPECT_EQ(Printable("\x1b[31m\x7f"), "\\x1b[31m\\x7f");
  EXPECT_EQ(Printable(std::string("\0", 1)), "\\x00");
  EXPECT_EQ(Printable("\xc2\x9b"), "\\u009b");
  EXPECT_EQ(Printable("\xe2\x80\xae\xe2\x80\xa8\xd8\x9c\xe2\x81\xa6"), "\\u202e\\u2028\\u061c\\u2066");
}

// Cut off, overlong, a surrogate, past the last code point, a byte that leads nothing.
TEST(Printable, BytesThatAreNoUtf8AreEscapes) {
  for (const auto& [text, shown] : {std::pair<std::string, std::string>{"\xff", "\\xff"},
                                    {"a\xc3", "a\\xc3"},
                                    {"\xc0\x80", "\\xc0\\x80"},
                                    {"\xe0\x80\x80", "\\xe0\\x80\\x80"},
                                    {"\xed\xa0\x80", "\\xed\\xa0\\x80"},
                                    {"\xf4\x90\x80\x80", "\\xf4\\x90\\x80\\x80"},
                                    {"\x80z", "\\x80z"}}) {
    EXPECT_EQ(Printable(text), shown);
    EXPECT_FALSE(IsUtf8(text));
  }
}

TEST(Printable, RandomBytesBecomePrintableUtf8AndStayThat) {
  const char* given = std::getenv("SHARDPLAN_SEED");
  const unsigned seed = given != nullptr ? std::stoul(given) : std::random_device{}();
  SCOPED_TRACE("SHARDPLAN_SEED=" + std::to_string(seed));
  std::mt19937 random(seed);
  for (int i = 0; i < 2000; ++i) {
    std::string text(random() % 40, '\0');
    for (char& c : text) c = static_cast<char>(random() % 3 == 0 ? random() % 256 : 0x20 + random() % 0x60);
    const std::string shown = Printable(text);
    EXPECT_TRUE(IsUtf8(shown));
    EXPECT_EQ(Printable(shown), shown);
    for (const char c : shown) EXPECT_TRUE(static_cast<unsigned char>(c) >= 0x20 && c != 0x7f);
  }
}

TEST(Printable, ErrorsAreSafeToPrint) {
  const Error error{.code = ErrorCode::kBadInput,
                    .message = "line\nanother\x1b",
                    .file = "fi\nle",
                    .pointer = "/a\x07",
                    .found = "\x1b]0;",
                    .expected = "\n"};
  EXPECT_EQ(ToString(error), "fi\\nle: /a\\x07: line\nanother\\x1b (found \\x1b]0;, expected \\n)");
}

}  // namespace
}  // namespace shardplan

// SPDX-License-Identifier: Apache-2.0
#include "harness/io/hdf5.hpp"

#include <hdf5.h>
#include <hdf5_hl.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <csignal>
#include <cstdlib>
#include <functional>
#include <limits>

#include "harness/io/hdf5_probe.hpp"
#include "tests/io/io_test_support.hpp"

namespace loopgauge::harness::h5 {
namespace {

using test::bytes_of;
using test::contains;
using test::error_of;
using test::write_bytes;

void write_file(const std::filesystem::path& path, const std::function<void(const Group&)>& fill) {
  File file = File::create(path);
  fill(file.root());
  file.close();
}

// A file made by the library itself, for what this layer cannot write.
void write_raw(const std::filesystem::path& path, const std::function<void(hid_t)>& fill) {
  const hid_t file = H5Fcreate(path.c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT);
  ASSERT_GE(file, 0);
  fill(file);
  ASSERT_GE(H5Fclose(file), 0);
}

template <class T>
void round_trip(const Tensor<T>& tensor, const Storage& storage) {
  const test::Folder folder;
  write_file(folder / "a.h5", [&](const Group& root) { root.write("x", tensor, storage); });
  const File file = File::open_readonly(folder / "a.h5");
  const Tensor<T> read = file.root().open_dataset("x").template read<T>();
  EXPECT_EQ(read.shape, tensor.shape);
  EXPECT_EQ(read.data, tensor.data);
}

TEST(Hdf5, RoundTripsEveryTypeAndStorage) {
  for (const Storage& storage : {kContiguous, kCompressed, Storage{9, {1, 2}}}) {
    Tensor<std::int32_t> integers({3, 2}, 0);
    integers.data = {0, -1, 2, std::numeric_limits<std::int32_t>::min(), std::numeric_limits<std::int32_t>::max(), 5};
    round_trip(integers, storage);
    Tensor<std::int64_t> wide({1, 2}, 0);
    wide.data = {std::numeric_limits<std::int64_t>::min(), 7};
    round_trip(wide, storage);
    Tensor<std::uint8_t> bytes({2, 2}, 0);
    bytes.data = {0, 255, 15, 16};
    round_trip(bytes, storage);
    Tensor<float> floats({2, 2}, 0);
    floats.data = {-0.0f, 1e-45f, std::numeric_limits<float>::infinity(), 3.5f};
    round_trip(floats, storage);
    Tensor<double> doubles({2, 2}, 0);
    doubles.data = {0.1, -1e308, 5e-324, 0};
    round_trip(doubles, storage);
    Tensor<std::string> texts({2, 2}, "");
    texts.data = {"", "one", "zwölf", "a longer string than the others"};
    round_trip(texts, storage);
  }
}

TEST(Hdf5, NegativeZeroAndNanKeepTheirBits) {
  const test::Folder folder;
  const float nan = std::bit_cast<float>(0x7fc12345u);
  write_file(folder / "a.h5", [&](const Group& root) { root.write("x", std::vector<float>{-0.0f, nan}); });
  const File file = File::open_readonly(folder / "a.h5");
  const std::vector<float> read = file.root().read_vector<float>("x");
  EXPECT_EQ(std::bit_cast<std::uint32_t>(read[0]), 0x80000000u);
  EXPECT_EQ(std::bit_cast<std::uint32_t>(read[1]), 0x7fc12345u);
}

TEST(Hdf5, EmptyDatasetsAndScalars) {
  const test::Folder folder;
  write_file(folder / "a.h5", [](const Group& root) {
    root.write("empty", std::vector<std::int32_t>{});
    root.write("empty_compressed", std::vector<std::int32_t>{}, kCompressed);
    const double pi = 3.25;
    root.write<double>("scalar", std::span(&pi, 1), {});
  });
  const File file = File::open_readonly(folder / "a.h5");
  EXPECT_TRUE(file.root().read_vector<std::int32_t>("empty").empty());
  EXPECT_TRUE(file.root().read_vector<std::int32_t>("empty_compressed").empty());
  const Tensor<double> scalar = file.root().open_dataset("scalar").read<double>({});
  EXPECT_EQ(scalar.shape, std::vector<std::int64_t>{});
  EXPECT_EQ(scalar.data, std::vector<double>{3.25});
}

TEST(Hdf5, CompressionShrinksAndEqualContentIsEqualBytes) {
  const test::Folder folder;
  const Tensor<float> tensor({512, 512}, 1.5f);
  for (const char* name : {"a.h5", "b.h5"}) {
    write_file(folder / name,
               [&](const Group& root) { root.create_group("g").write("x", tensor, kCompressed).set_attribute("unit", "nats"); });
  }
  EXPECT_LT(std::filesystem::file_size(folder / "a.h5"), 64u << 10);
  EXPECT_EQ(bytes_of(folder / "a.h5"), bytes_of(folder / "b.h5"));
  const File file = File::open_readonly(folder / "a.h5");
  EXPECT_EQ(file.root().open_group("g").open_dataset("x").read<float>().data, tensor.data);
}

TEST(Hdf5, RoundTripsAttributes) {
  const test::Folder folder;
  const std::vector<std::int64_t> integers{1, -2, 3};
  const std::vector<double> doubles{0.5, -1e300};
  const std::vector<std::string> texts{"a", "", "ccc"};
  write_file(folder / "a.h5", [&](const Group& root) {
    root.set_attribute("text", "first");
    root.set_attribute("text", "second, replaced");
    root.set_attribute("integer", std::int64_t{-5});
    root.set_attribute("large", std::numeric_limits<std::uint64_t>::max());
    root.set_attribute("double", 0.25);
    root.set_attribute("integers", std::span<const std::int64_t>(integers));
    root.set_attribute("doubles", std::span<const double>(doubles));
    root.set_attribute("texts", std::span<const std::string>(texts));
  });
  const File file = File::open_readonly(folder / "a.h5");
  const Group root = file.root();
  EXPECT_EQ(root.attribute_names(), (std::vector<std::string>{"double", "doubles", "integer", "integers", "large", "text", "texts"}));
  EXPECT_EQ(root.string_attribute("text"), "second, replaced");
  EXPECT_EQ(root.int_attribute("integer"), -5);
  EXPECT_EQ(root.uint_attribute("large"), std::numeric_limits<std::uint64_t>::max());
  EXPECT_EQ(root.double_attribute("double"), 0.25);
  EXPECT_EQ(root.int_array_attribute("integers"), integers);
  EXPECT_EQ(root.double_array_attribute("doubles"), doubles);
  EXPECT_EQ(root.string_array_attribute("texts"), texts);
  EXPECT_TRUE(contains(error_of([&] { root.int_attribute("absent"); }), "a.h5: /: attribute `absent` is missing"));
  EXPECT_TRUE(contains(error_of([&] { root.int_attribute("text"); }), "attribute `text` is string, expected an integer"));
  EXPECT_TRUE(contains(error_of([&] { root.string_attribute("integer"); }), "attribute `integer` is int64, expected a string"));
  EXPECT_TRUE(contains(error_of([&] { root.int_attribute("integers"); }), "attribute `integers` is of rank 1, expected a scalar"));
  EXPECT_TRUE(contains(error_of([&] { root.int_attribute("large"); }), "does not fit 63 bits"));
  EXPECT_TRUE(contains(error_of([&] { root.uint_attribute("integer"); }), "attribute `integer` = -5 is negative"));
}

TEST(Hdf5, FixedLengthStringsOfEveryPadding) {
  const test::Folder folder;
  write_raw(folder / "a.h5", [](hid_t file) {
    const hid_t space = H5Screate(H5S_SCALAR);
    for (const auto& [name, padding, bytes] :
         {std::tuple{"terminated", H5T_STR_NULLTERM, "abc\0zz"}, std::tuple{"null", H5T_STR_NULLPAD, "abcdef"},
          std::tuple{"space", H5T_STR_SPACEPAD, "abc   "}}) {
      const hid_t type = H5Tcopy(H5T_C_S1);
      H5Tset_size(type, 6);
      H5Tset_strpad(type, padding);
      const hid_t attribute = H5Acreate2(file, name, type, space, H5P_DEFAULT, H5P_DEFAULT);
      ASSERT_GE(H5Awrite(attribute, type, bytes), 0);
      H5Aclose(attribute);
      H5Tclose(type);
    }
    H5Sclose(space);
  });
  const File file = File::open_readonly(folder / "a.h5");
  EXPECT_EQ(file.root().string_attribute("terminated"), "abc");
  EXPECT_EQ(file.root().string_attribute("null"), "abcdef");
  EXPECT_EQ(file.root().string_attribute("space"), "abc");
}

TEST(Hdf5, MembersInNumericOrder) {
  const test::Folder folder;
  write_file(folder / "a.h5", [](const Group& root) {
    for (const char* name : {"10", "9", "100", "b", "a"}) root.create_group(name);
    root.require_group("a/deep/er");
    root.require_group("a/deep/est");
  });
  const File file = File::open_readonly(folder / "a.h5");
  EXPECT_EQ(file.root().members(), (std::vector<std::string>{"9", "10", "100", "a", "b"}));
  EXPECT_EQ(file.root().open_group("a").open_group("deep").members(), (std::vector<std::string>{"er", "est"}));
  EXPECT_TRUE(file.root().has_group("a"));
  EXPECT_FALSE(file.root().has_dataset("a"));
  EXPECT_FALSE(file.root().has("c"));
}

TEST(Hdf5, RefusalsNameFileObjectExpectedAndFound) {
  const test::Folder folder;
  write_file(folder / "a.h5", [](const Group& root) {
    root.create_group("g").write("x", Tensor<float>({2, 3}, 0.0f));
    root.create_group("h").set_attribute("odd", 1);
  });
  const File file = File::open_readonly(folder / "a.h5");
  const Group root = file.root();
  const Dataset x = root.open_group("g").open_dataset("x");
  EXPECT_TRUE(contains(error_of([&] { x.read<std::int32_t>(); }), "a.h5: /g/x: is float32, expected int32"));
  EXPECT_TRUE(contains(error_of([&] { x.read<double>(); }), "a.h5: /g/x: is float32, expected float64"));
  EXPECT_TRUE(contains(error_of([&] { x.read<float>({2, 4}); }), "/g/x: has extent [2, 3], expected [2, 4]"));
  EXPECT_TRUE(contains(error_of([&] { x.read<float>({-1}); }), "/g/x: has extent [2, 3], expected [any]"));
  EXPECT_TRUE(contains(error_of([&] { root.open_dataset("g"); }), "/g: is not a dataset"));
  EXPECT_TRUE(contains(error_of([&] { root.open_group("g").open_group("x"); }), "/g/x: is not a group"));
  EXPECT_TRUE(contains(error_of([&] { root.open_group("nothing"); }), "/: has no member `nothing`, expected a group"));
  constexpr std::array<std::string_view, 1> kMembers{"g"};
  EXPECT_TRUE(contains(error_of([&] { root.allow_only(kMembers, {}); }), "/: has the unknown member `h`"));
  EXPECT_TRUE(contains(error_of([&] { root.open_group("h").allow_only({}, {}); }), "/h: has the unknown attribute `odd`"));
}

TEST(Hdf5, RefusesTypesOutsideItsList) {
  const test::Folder folder;
  write_raw(folder / "a.h5", [](hid_t file) {
    const hsize_t extent = 2;
    const hid_t space = H5Screate_simple(1, &extent, nullptr);
    const std::array<std::int16_t, 2> values{1, 2};
    const hid_t dataset = H5Dcreate2(file, "short", H5T_STD_I16LE, space, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT);
    H5Dwrite(dataset, H5T_NATIVE_INT16, H5S_ALL, H5S_ALL, H5P_DEFAULT, values.data());
    H5Dclose(dataset);
    H5Sclose(space);
  });
  const File file = File::open_readonly(folder / "a.h5");
  EXPECT_TRUE(contains(error_of([&] { file.root().read_vector<std::int32_t>("short"); }), "/short: is int16, expected int32"));
}

TEST(Hdf5, ReadsEitherByteOrder) {
  const test::Folder folder;
  write_raw(folder / "a.h5", [](hid_t file) {
    const hsize_t extent = 2;
    const hid_t space = H5Screate_simple(1, &extent, nullptr);
    const std::array<std::int32_t, 2> values{1, -70000};
    const hid_t dataset = H5Dcreate2(file, "big", H5T_STD_I32BE, space, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT);
    H5Dwrite(dataset, H5T_NATIVE_INT32, H5S_ALL, H5S_ALL, H5P_DEFAULT, values.data());
    H5Dclose(dataset);
    H5Sclose(space);
  });
  const File file = File::open_readonly(folder / "a.h5");
  EXPECT_EQ(file.root().read_vector<std::int32_t>("big"), (std::vector<std::int32_t>{1, -70000}));
}

TEST(Hdf5, RefusesLinksOutOfTheFile) {
  const test::Folder folder;
  write_raw(folder / "a.h5", [](hid_t file) {
    H5Lcreate_soft("/nowhere", file, "soft", H5P_DEFAULT, H5P_DEFAULT);
    H5Lcreate_external("other.h5", "/x", file, "external", H5P_DEFAULT, H5P_DEFAULT);
  });
  const File file = File::open_readonly(folder / "a.h5");
  EXPECT_TRUE(contains(error_of([&] { file.root().has("soft"); }), "member `soft` is a soft or external link"));
  EXPECT_TRUE(contains(error_of([&] { file.root().open_dataset("external"); }), "member `external` is a soft or external link"));
  EXPECT_TRUE(contains(error_of([&] { file.root().members(); }), "is a soft or external link"));
}

TEST(Hdf5, RefusesDataElsewhere) {
  const test::Folder folder;
  std::ofstream(folder / "outside.bin") << "12345678";
  write_raw(folder / "a.h5", [&](hid_t file) {
    const hsize_t extent = 2;
    const hid_t space = H5Screate_simple(1, &extent, nullptr);
    const hid_t plist = H5Pcreate(H5P_DATASET_CREATE);
    H5Pset_external(plist, (folder / "outside.bin").c_str(), 0, 8);
    H5Dclose(H5Dcreate2(file, "x", H5T_STD_I32LE, space, H5P_DEFAULT, plist, H5P_DEFAULT));
    H5Pclose(plist);
    H5Sclose(space);
  });
  const File file = File::open_readonly(folder / "a.h5");
  EXPECT_TRUE(contains(error_of([&] { file.root().read_vector<std::int32_t>("x"); }), "/x: keeps its data in another file"));
}

TEST(Hdf5, RefusesExtentsThatTheBytesCannotAccountFor) {
  const test::Folder folder;
  write_raw(folder / "a.h5", [](hid_t file) {
    const std::array<hsize_t, 2> extents{hsize_t{1} << 31, hsize_t{1} << 31};
    const hid_t space = H5Screate_simple(2, extents.data(), nullptr);
    const hid_t plist = H5Pcreate(H5P_DATASET_CREATE);
    const std::array<hsize_t, 2> chunk{1024, 1024};
    H5Pset_chunk(plist, 2, chunk.data());
    H5Pset_deflate(plist, 1);
    H5Dclose(H5Dcreate2(file, "unwritten", H5T_IEEE_F32LE, space, H5P_DEFAULT, plist, H5P_DEFAULT));
    const hid_t sparse = H5Dcreate2(file, "sparse", H5T_IEEE_F32LE, space, H5P_DEFAULT, plist, H5P_DEFAULT);
    const std::array<hsize_t, 2> at{0, 0}, one{1, 1};
    const hid_t selected = H5Scopy(space);
    H5Sselect_hyperslab(selected, H5S_SELECT_SET, at.data(), nullptr, one.data(), nullptr);
    const hid_t memory = H5Screate_simple(2, one.data(), nullptr);
    const float value = 1;
    H5Dwrite(sparse, H5T_NATIVE_FLOAT, memory, selected, H5P_DEFAULT, &value);
    H5Dclose(sparse);
    H5Sclose(memory), H5Sclose(selected), H5Sclose(space), H5Pclose(plist);
  });
  const File file = File::open_readonly(folder / "a.h5");
  EXPECT_TRUE(contains(error_of([&] { file.root().open_dataset("unwritten").read<float>(); }), "/unwritten: has the absurd extent"));
  EXPECT_TRUE(contains(error_of([&] { file.root().open_dataset("sparse").read<float>(); }), "/sparse: has the absurd extent"));
}

TEST(Hdf5, RefusesDatasetsWithoutData) {
  const test::Folder folder;
  write_raw(folder / "a.h5", [](hid_t file) {
    const hsize_t extent = 1000;
    const hid_t space = H5Screate_simple(1, &extent, nullptr);
    H5Dclose(H5Dcreate2(file, "x", H5T_IEEE_F32LE, space, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT));
    H5Sclose(space);
  });
  const File file = File::open_readonly(folder / "a.h5");
  EXPECT_TRUE(contains(error_of([&] { file.root().open_dataset("x").read<float>(); }), "is declared with extent [1000] but holds no data"));
}

TEST(Hdf5, RefusesWhatIsNotAWholeFile) {
  const test::Folder folder;
  EXPECT_TRUE(contains(error_of([&] { File::open_readonly(folder / "missing.h5"); }), "missing.h5: no such file"));
  EXPECT_TRUE(contains(error_of([&] { File::open_readonly(folder / ""); }), "is not a regular file"));
  write_bytes(folder / "empty.h5", {});
  EXPECT_TRUE(contains(error_of([&] { File::open_readonly(folder / "empty.h5"); }), "is not an HDF5 file"));
  write_bytes(folder / "text.h5", std::vector<char>(5000, 'x'));
  EXPECT_TRUE(contains(error_of([&] { File::open_readonly(folder / "text.h5"); }), "is not an HDF5 file"));

  write_file(folder / "whole.h5", [](const Group& root) { root.write("x", Tensor<float>({100, 100}, 1.0f)); });
  const std::vector<char> whole = bytes_of(folder / "whole.h5");
  for (const std::size_t length : {std::size_t{9}, std::size_t{47}}) {
    write_bytes(folder / "cut.h5", {whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(length)});
    EXPECT_TRUE(contains(error_of([&] { File::open_readonly(folder / "cut.h5"); }), "cut off inside the HDF5 superblock"));
  }
  for (const std::size_t length : {std::size_t{96}, whole.size() / 2, whole.size() - 1}) {
    write_bytes(folder / "cut.h5", {whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(length)});
    EXPECT_TRUE(contains(error_of([&] { File::open_readonly(folder / "cut.h5"); }), "is truncated: its superblock declares"));
  }
  std::vector<char> future = whole;
  future[8] = 9;
  write_bytes(folder / "future.h5", future);
  EXPECT_TRUE(contains(error_of([&] { File::open_readonly(folder / "future.h5"); }), "superblock version 9"));
}

TEST(Hdf5, AChildFindsOutWhatCrashesOrNeverEnds) {
  EXPECT_EQ(error_of([] {
              probe_in_child(
                  "a.h5", [] {}, 5);
            }),
            "");
  EXPECT_EQ(error_of([] {
              probe_in_child(
                  "a.h5", [] { throw FileError("an orderly refusal"); }, 5);
            }),
            "");
  EXPECT_TRUE(contains(error_of([] {
                         probe_in_child(
                             "a.h5", [] { std::raise(SIGSEGV); }, 5);
                       }),
                       "a.h5: the HDF5 library crashes on it"));
  EXPECT_TRUE(contains(error_of([] {
                         probe_in_child(
                             "a.h5", [] { std::abort(); }, 5);
                       }),
                       "a.h5: the HDF5 library crashes on it"));
  const auto loop = [] {
    std::atomic<bool> running = true;
    while (running) {
    }
  };
  EXPECT_TRUE(contains(error_of([&] { probe_in_child("a.h5", loop, 1); }), "a.h5: reading it comes to no end"));
}

TEST(Hdf5, NoCorruptionEndsTheProcess) {
  const test::Folder folder;
  write_file(folder / "whole.h5", [](const Group& root) {
    const Dataset x = root.create_group("g").write("x", Tensor<float>({20, 3}, 1.0f), kCompressed);
    x.set_attribute("unit", "nats");
    root.write("names", std::vector<std::string>{"a", "bb"});
  });
  const std::vector<char> whole = bytes_of(folder / "whole.h5");
  int refused = 0, tried = 0;
  for (std::size_t at = 8; at + 8 < whole.size(); at += 71) {
    std::vector<char> corrupt = whole;
    std::fill_n(corrupt.begin() + static_cast<std::ptrdiff_t>(at), 4, static_cast<char>(0xff));
    write_bytes(folder / "corrupt.h5", corrupt);
    const std::string sentence = error_of([&] {
      const File file = File::open_readonly(folder / "corrupt.h5");
      const Dataset x = file.root().open_group("g").open_dataset("x");
      x.read<float>({20, 3});
      x.string_attribute("unit");
      file.root().read_vector<std::string>("names");
    });
    EXPECT_TRUE(sentence.empty() || contains(sentence, "corrupt.h5")) << at;
    refused += sentence.empty() ? 0 : 1;
    ++tried;
  }
  EXPECT_GT(refused, 0);  // unused bytes are many: most corruptions change nothing
  EXPECT_GT(tried, 50);
}

TEST(Hdf5, DimensionScales) {
  const test::Folder folder;
  write_file(folder / "a.h5", [](const Group& root) {
    const Dataset loop = root.write("loop", std::vector<std::int32_t>{1, 2, 3, 4});
    loop.make_scale("loop");
    std::vector<Dataset> datasets{root.write("values", std::vector<float>{1, 2, 3, 4}),
                                  root.write("words", std::vector<std::string>{"a", "b", "c", "d"})};
    for (const Dataset& dataset : datasets) dataset.take_scale(loop);
    loop.list_users(datasets);
  });
  {
    const File file = File::open_readonly(folder / "a.h5");
    EXPECT_EQ(file.root().open_dataset("loop").string_attribute("CLASS"), "DIMENSION_SCALE");
    EXPECT_TRUE(file.root().open_dataset("values").has_attribute("DIMENSION_LIST"));
  }
  // The library's own functions see what its own functions would have written.
  const hid_t raw = H5Fopen((folder / "a.h5").c_str(), H5F_ACC_RDONLY, H5P_DEFAULT);
  ASSERT_GE(raw, 0);
  const hid_t scale = H5Dopen2(raw, "loop", H5P_DEFAULT);
  for (const char* name : {"values", "words"}) {
    const hid_t dataset = H5Dopen2(raw, name, H5P_DEFAULT);
    EXPECT_EQ(H5DSis_attached(dataset, scale, 0), 1) << name;
    EXPECT_EQ(H5DSget_num_scales(dataset, 0), 1) << name;
    H5Dclose(dataset);
  }
  H5Dclose(scale);
  H5Fclose(raw);
}

TEST(Hdf5, ClosingWithOpenObjectsIsAnInternalError) {
  const test::Folder folder;
  File file = File::create(folder / "a.h5");
  const Group root = file.root();
  EXPECT_THROW(file.close(), InternalError);
}

TEST(Hdf5, WrongElementCountIsAnInternalError) {
  const test::Folder folder;
  File file = File::create(folder / "a.h5");
  const std::vector<float> values(5);
  EXPECT_THROW(file.root().write<float>("x", values, {2, 3}), InternalError);
}

}  // namespace
}  // namespace loopgauge::harness::h5

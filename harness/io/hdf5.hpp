// SPDX-License-Identifier: Apache-2.0
// A thin RAII layer over the HDF5 C API: files, groups, datasets and attributes with typed contents, and every failure a FileError
// that names the file, the object, what was expected and what was found. HDF5's own error printing is off.
//
// Reading trusts nothing. The library itself crashes on some corrupt files, so a file is first read through by a child process, whose
// death is a refusal like any other. Only hard links are followed, external and virtual storage and filters other than deflate, shuffle and
// fletcher32 are refused, and no allocation exceeds what the bytes of the file can account for (deflate expands at most 1032 times).
//
// The HDF5 library is not thread safe as packaged: use this layer from one thread at a time.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "models/tensor.hpp"

namespace loopgauge::harness {
class AtomicOutput;
}

namespace loopgauge::harness::h5 {

// Element types of datasets and attributes. Files store little-endian int32, int64, uint8, IEEE float32 and float64, UTF-8 strings.
enum class ElementType { int32, int64, uint8, float32, float64, string, other };
std::string_view to_string(ElementType type);

// How a dataset is laid out. Deflate level 0 stores contiguously; above 0 chunks, shuffles and compresses.
struct Storage {
  int deflate = 0;                  // 0..9
  std::vector<std::int64_t> chunk;  // extents of a chunk; empty: chosen (about 256 KiB)
};
inline const Storage kContiguous{};
inline const Storage kCompressed{4, {}};

using Id = std::int64_t;  // hid_t, kept out of this header so that users need no HDF5 include path

// Shared ownership of one open HDF5 identifier and where it is, for messages.
class Handle {
 public:
  Handle() = default;
  Handle(Id id, int (*close)(Id))
      : id_(new Id(id), [close](Id* open) {
          close(*open);
          delete open;
        }) {}
  Id get() const { return *id_; }
  explicit operator bool() const { return id_ != nullptr; }

 private:
  std::shared_ptr<Id> id_;
};

// What groups and datasets have in common: a place and attributes.
class Object {
 public:
  const std::string& path() const { return path_; }   // inside the file, "/requests/0/prompt"
  const std::string& file() const { return *file_; }  // path of the file as it was opened
  std::string where() const { return file() + ": " + path(); }

  std::vector<std::string> attribute_names() const;  // sorted
  bool has_attribute(const std::string& name) const;

  // Each throws FileError when the attribute is missing, of another type, out of the range of the result, or of another rank.
  std::string string_attribute(const std::string& name) const;                   // scalar; fixed or variable length
  std::int64_t int_attribute(const std::string& name) const;                     // scalar; any stored integer type
  std::uint64_t uint_attribute(const std::string& name) const;                   // scalar; any stored integer type, not negative
  double double_attribute(const std::string& name) const;                        // scalar; any stored float or integer type
  std::vector<std::int64_t> int_array_attribute(const std::string& name) const;  // one-dimensional
  std::vector<double> double_array_attribute(const std::string& name) const;
  std::vector<std::string> string_array_attribute(const std::string& name) const;

  // Written as variable-length UTF-8, int64, float64; one-dimensional for arrays. An existing attribute is replaced.
  void set_attribute(const std::string& name, std::string_view text) const;
  void set_attribute(const std::string& name, const char* text) const { set_attribute(name, std::string_view(text)); }
  void set_attribute(const std::string& name, std::int64_t value) const;
  void set_attribute(const std::string& name, int value) const { set_attribute(name, std::int64_t{value}); }
  void set_attribute(const std::string& name, std::uint64_t value) const;
  void set_attribute(const std::string& name, double value) const;
  void set_attribute(const std::string& name, std::span<const std::int64_t> values) const;
  void set_attribute(const std::string& name, std::span<const double> values) const;
  void set_attribute(const std::string& name, std::span<const std::string> values) const;

  // Throws naming the first attribute that is not listed.
  void allow_only_attributes(std::span<const std::string_view> attributes) const;

  // The FileError to throw about this object: "<file>: <path>: <what>".
  [[noreturn]] void fail(const std::string& what) const;

 protected:
  Object(Handle handle, std::shared_ptr<const std::string> file, std::string path)
      : handle_(std::move(handle)), file_(std::move(file)), path_(std::move(path)) {}
  Id id() const { return handle_.get(); }

  Handle handle_;
  std::shared_ptr<const std::string> file_;
  std::string path_;
};

class Dataset : public Object {
 public:
  ElementType type() const;
  std::vector<std::int64_t> shape() const;  // empty for a scalar
  std::int64_t element_count() const;

  // The whole dataset. T is one of int32_t, int64_t, uint8_t, float, double, std::string and must be the stored type exactly (strings
  // fixed or variable length), so that nothing is rounded or wrapped unseen. Refuses datasets declared but never written.
  template <class T>
  Tensor<T> read() const;
  // The same, requiring these extents; -1 accepts any extent.
  template <class T>
  Tensor<T> read(const std::vector<std::int64_t>& expected_shape) const;

  // Dimension scales (HDF5 High Level, "DS"): netCDF and xarray find axis names and coordinates through them.
  void make_scale(const std::string& name) const;
  // `scale` becomes that of the first axis. It has to learn of it once, from all who did: HDF5's own call rewrites the scale's list of users
  // for each of them.
  void take_scale(const Dataset& scale) const;
  void list_users(std::span<const Dataset> datasets) const;  // of this scale; all in one call

 private:
  friend class Group;
  using Object::Object;
  template <class T>
  Tensor<T> read_as(const std::vector<std::int64_t>* expected_shape) const;  // null: any
};

class Group : public Object {
 public:
  // Names of all members, numbers in numeric order ("2" before "10"), others by bytes. Throws when a member is not a hard link.
  std::vector<std::string> members() const;
  bool has(const std::string& name) const;  // a direct member of this name, reached by a hard link
  bool has_group(const std::string& name) const;
  bool has_dataset(const std::string& name) const;

  // `name` is one path component; intermediate() below takes "a/b/c".
  Group open_group(const std::string& name) const;
  Dataset open_dataset(const std::string& name) const;
  Group create_group(const std::string& name) const;   // fails when it exists
  Group require_group(const std::string& name) const;  // opens or creates; accepts "a/b/c"

  // Writes a new dataset; product(shape) must equal values.size(); an empty shape writes a scalar.
  template <class T>
  Dataset write(const std::string& name, std::span<const T> values, const std::vector<std::int64_t>& shape,
                const Storage& storage = kContiguous) const;
  template <class T>
  Dataset write(const std::string& name, const Tensor<T>& tensor, const Storage& storage = kContiguous) const {
    return write<T>(name, std::span<const T>(tensor.data), tensor.shape, storage);
  }
  template <class T>
  Dataset write(const std::string& name, const std::vector<T>& values, const Storage& storage = kContiguous) const {
    return write<T>(name, std::span<const T>(values), {static_cast<std::int64_t>(values.size())}, storage);
  }

  // One-dimensional dataset of any length.
  template <class T>
  std::vector<T> read_vector(const std::string& name) const {
    return std::move(open_dataset(name).template read<T>({-1}).data);
  }

  // Throws naming the first member or attribute that is not listed: formats here are closed.
  void allow_only(std::span<const std::string_view> members, std::span<const std::string_view> attributes) const;

 private:
  friend class File;
  using Object::Object;
};

// Whether a file may hold anything, or was read through by a child process already.
enum class Trust { unknown, probed };

// Which readers a new file needs. `compact` stores thousands of small chunked datasets without an index block (2 KiB) for each.
enum class FileFormat {
  earliest,  // any HDF5 library
  compact,   // HDF5 1.10 (2016) or later
};

// Closing happens in the destructor; call close() after writing so that a full disk is an error and not a silent loss.
class File {
 public:
  // Refuses what is not a whole HDF5 file: the signature, superblock and end-of-file address are checked before the library opens it.
  // With Trust::unknown all of it is read once in a forked child first, which costs the time of a second reading.
  static File open_readonly(const std::filesystem::path& path, Trust trust = Trust::unknown);
  // Truncates: `path` may be seen half written. Throws FileError when it cannot be created.
  static File create(const std::filesystem::path& path, FileFormat format = FileFormat::earliest);
  // The file that `output.commit()`, after close(), makes visible as a whole. Messages name its destination.
  static File create(const AtomicOutput& output, FileFormat format = FileFormat::earliest);

  Group root() const;
  void close();  // flushes; all groups and datasets of the file must be gone

 private:
  File(Handle handle, std::filesystem::path path);
  static File create(const std::filesystem::path& path, FileFormat format, const std::filesystem::path& name);
  Handle handle_;
  std::shared_ptr<const std::string> name_;
  bool writable_ = false;
};

}  // namespace loopgauge::harness::h5

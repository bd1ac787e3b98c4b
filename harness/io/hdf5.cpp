// SPDX-License-Identifier: Apache-2.0
#include "harness/io/hdf5.hpp"

#include <hdf5.h>
#include <hdf5_hl.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <optional>
#include <type_traits>

#include "harness/io/atomic_output.hpp"
#include "harness/io/hdf5_probe.hpp"
#include "models/error.hpp"

namespace loopgauge::harness::h5 {

static_assert(std::is_same_v<hid_t, Id>, "the header spells hid_t as Id");

namespace {

constexpr int kMaxRank = 8;
constexpr std::int64_t kDeflateExpansion = 1100;                    // deflate expands at most 1032 times; headers take the rest
constexpr std::int64_t kMinChunkAllowance = std::int64_t{1} << 20;  // bytes of one chunk that are accepted however little is stored
constexpr std::int64_t kAlwaysAllocated = std::int64_t{1} << 20;    // bytes of a dataset that are compared with what it stores, not with the file
constexpr std::int64_t kMaxStringBytes = std::int64_t{1} << 20;     // of one string
constexpr std::int64_t kChunkBytes = std::int64_t{1} << 18;         // of a chunk this layer chooses

using Extents = std::vector<std::int64_t>;

// HDF5's text of a failed system call holds times, names and addresses; what a reader needs is the call and the system's reason.
std::string shortened(const std::string& text) {
  constexpr std::string_view kCause = "error message = '";
  const std::size_t call_end = text.find(": time = "), cause = text.find(kCause);
  const std::size_t cause_end = cause == std::string::npos ? cause : text.find('\'', cause + kCause.size());
  if (call_end == std::string::npos || cause_end == std::string::npos) return text;
  return text.substr(0, call_end) + ": " + text.substr(cause + kCause.size(), cause_end - cause - kCause.size());
}

// The innermost line of HDF5's error stack: the cause rather than the consequence.
std::string hdf5_reason() {
  std::string text;
  H5Ewalk2(
      H5E_DEFAULT, H5E_WALK_UPWARD,
      [](unsigned, const H5E_error2_t* entry, void* out) -> herr_t {
        auto& result = *static_cast<std::string*>(out);
        if (result.empty() && entry->desc != nullptr) result = entry->desc;
        return 0;
      },
      &text);
  H5Eclear2(H5E_DEFAULT);
  return text.empty() ? "" : " (HDF5: " + shortened(text) + ")";
}

// Printing is a property of the calling thread's error stack, so it is switched off wherever a file is opened.
void prepare_library() {
  // At its exit the library closes what is still open, and crashes on a file that could not be written to its end. Here every file has an owner that closes it.
  [[maybe_unused]] static const herr_t no_exit_handler = H5dont_atexit();
  H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);
  H5PLset_loading_state(0);  // a file must not make the process load filter plugins
}

Handle own(hid_t id, int (*close)(Id)) { return id < 0 ? Handle() : Handle(id, close); }

std::string join(const std::string& parent, const std::string& name) { return parent == "/" ? "/" + name : parent + "/" + name; }

std::string shape_text(const Extents& shape) {
  std::string text = "[";
  for (std::size_t axis = 0; axis < shape.size(); ++axis) {
    text += (axis == 0 ? "" : ", ") + (shape[axis] < 0 ? std::string("any") : std::to_string(shape[axis]));
  }
  return text + "]";
}

template <class T>
constexpr ElementType element_type() {
  if constexpr (std::is_same_v<T, std::int32_t>) return ElementType::int32;
  if constexpr (std::is_same_v<T, std::int64_t>) return ElementType::int64;
  if constexpr (std::is_same_v<T, std::uint8_t>) return ElementType::uint8;
  if constexpr (std::is_same_v<T, float>) return ElementType::float32;
  if constexpr (std::is_same_v<T, double>) return ElementType::float64;
  if constexpr (std::is_same_v<T, std::string>) return ElementType::string;
}

hid_t stored_type(ElementType type) {
  switch (type) {
    case ElementType::int32:
      return H5T_STD_I32LE;
    case ElementType::int64:
      return H5T_STD_I64LE;
    case ElementType::uint8:
      return H5T_STD_U8LE;
    case ElementType::float32:
      return H5T_IEEE_F32LE;
    case ElementType::float64:
      return H5T_IEEE_F64LE;
    default:
      throw InternalError("HDF5 layer: " + std::string(to_string(type)) + " has no fixed-size stored type");
  }
}

hid_t memory_type(ElementType type) {
  switch (type) {
    case ElementType::int32:
      return H5T_NATIVE_INT32;
    case ElementType::int64:
      return H5T_NATIVE_INT64;
    case ElementType::uint8:
      return H5T_NATIVE_UINT8;
    case ElementType::float32:
      return H5T_NATIVE_FLOAT;
    case ElementType::float64:
      return H5T_NATIVE_DOUBLE;
    default:
      throw InternalError("HDF5 layer: " + std::string(to_string(type)) + " has no fixed-size memory type");
  }
}

ElementType classify(hid_t type) {
  const auto is = [type](hid_t little, hid_t big) { return H5Tequal(type, little) > 0 || H5Tequal(type, big) > 0; };
  if (is(H5T_STD_I32LE, H5T_STD_I32BE)) return ElementType::int32;
  if (is(H5T_STD_I64LE, H5T_STD_I64BE)) return ElementType::int64;
  if (is(H5T_STD_U8LE, H5T_STD_U8BE)) return ElementType::uint8;
  if (is(H5T_IEEE_F32LE, H5T_IEEE_F32BE)) return ElementType::float32;
  if (is(H5T_IEEE_F64LE, H5T_IEEE_F64BE)) return ElementType::float64;
  if (H5Tget_class(type) == H5T_STRING) return ElementType::string;
  return ElementType::other;
}

// A stored type in words, the ones outside ElementType too: "float16" is what a user who chose it needs to read.
std::string describe(hid_t type) {
  const ElementType known = classify(type);
  if (known != ElementType::other) return std::string(to_string(known));
  const std::string bits = std::to_string(8 * H5Tget_size(type));
  switch (H5Tget_class(type)) {
    case H5T_INTEGER:
      return (H5Tget_sign(type) == H5T_SGN_NONE ? "uint" : "int") + bits;
    case H5T_FLOAT:
      return "float" + bits;
    case H5T_ENUM:
      return "an enumeration";
    case H5T_COMPOUND:
      return "a compound";
    case H5T_VLEN:
      return "a variable-length sequence";
    case H5T_REFERENCE:
      return "a reference";
    case H5T_ARRAY:
      return "an array";
    default:
      return "another type";
  }
}

// Transfers of variable-length strings convert through a buffer that the library allocates and clears each time, 1 MiB unless told
// otherwise: with thousands of short columns that is most of the time.
Handle string_transfer() {
  constexpr std::size_t kConversionBytes = 16384;
  Handle transfer = own(H5Pcreate(H5P_DATASET_XFER), H5Pclose);
  if (!transfer || H5Pset_buffer(transfer.get(), kConversionBytes, nullptr, nullptr) < 0) {
    throw InternalError("HDF5 layer: transfer properties" + hdf5_reason());
  }
  return transfer;
}

// Memory that the strings of one dataset may take while they are read.
struct StringBudget {
  std::size_t left = 0;
  bool exceeded = false;
};

void* allocate_string(std::size_t bytes, void* budget_pointer) {
  auto& budget = *static_cast<StringBudget*>(budget_pointer);
  if (bytes > budget.left) {
    budget.exceeded = true;
    return nullptr;
  }
  budget.left -= bytes;
  return std::malloc(bytes);
}

void free_string(void* text, void*) { std::free(text); }

// The same for reading within `budget`, which must outlive the result.
Handle string_transfer(StringBudget& budget) {
  Handle transfer = string_transfer();
  if (H5Pset_vlen_mem_manager(transfer.get(), allocate_string, &budget, free_string, &budget) < 0) {
    throw InternalError("HDF5 layer: transfer properties" + hdf5_reason());
  }
  return transfer;
}

Handle utf8_string_type() {
  Handle type = own(H5Tcopy(H5T_C_S1), H5Tclose);
  if (!type || H5Tset_size(type.get(), H5T_VARIABLE) < 0 || H5Tset_cset(type.get(), H5T_CSET_UTF8) < 0) {
    throw InternalError("HDF5 layer: the string type cannot be made" + hdf5_reason());
  }
  return type;
}

std::optional<Extents> extents_of(hid_t space) {
  if (H5Sget_simple_extent_type(space) == H5S_SCALAR) return Extents{};
  const int rank = H5Sget_simple_extent_ndims(space);
  if (H5Sget_simple_extent_type(space) != H5S_SIMPLE || rank < 0 || rank > kMaxRank) return std::nullopt;
  std::array<hsize_t, H5S_MAX_RANK> extents{};
  if (H5Sget_simple_extent_dims(space, extents.data(), nullptr) < 0) return std::nullopt;
  Extents shape;
  for (int axis = 0; axis < rank; ++axis) {
    if (extents[static_cast<std::size_t>(axis)] > static_cast<hsize_t>(std::numeric_limits<std::int64_t>::max())) return std::nullopt;
    shape.push_back(static_cast<std::int64_t>(extents[static_cast<std::size_t>(axis)]));
  }
  return shape;
}

// product(shape) * item, or nothing where it leaves 63 bits.
std::optional<std::int64_t> checked_product(const Extents& shape, std::int64_t item) {
  std::int64_t product = item;
  for (const std::int64_t extent : shape) {
    if (extent < 0 || __builtin_mul_overflow(product, extent, &product)) return std::nullopt;
  }
  return product;
}

Handle make_space(const Object& object, const Extents& shape) {
  if (shape.empty()) return own(H5Screate(H5S_SCALAR), H5Sclose);
  std::vector<hsize_t> extents(shape.begin(), shape.end());
  Handle space = own(H5Screate_simple(static_cast<int>(extents.size()), extents.data(), nullptr), H5Sclose);
  if (!space) object.fail("a dataspace of extents " + shape_text(shape) + " cannot be made" + hdf5_reason());
  return space;
}

// A fixed-length string as stored, up to its padding.
std::string unpad(const char* bytes, std::size_t size, H5T_str_t padding) {
  std::string text(bytes, size);
  if (padding == H5T_STR_NULLTERM) return text.substr(0, text.find('\0'));
  const char fill = padding == H5T_STR_SPACEPAD ? ' ' : '\0';
  const std::size_t last = text.find_last_not_of(fill);
  return last == std::string::npos ? "" : text.substr(0, last + 1);
}

// Strings of an attribute or dataset: `read` fills a buffer with `count` elements of the given memory type.
template <class ReadInto>
std::vector<std::string> read_strings(const Object& object, const std::string& what, hid_t file_type, hid_t space, std::int64_t count,
                                      ReadInto read) {
  std::vector<std::string> result;
  if (count == 0) return result;
  const Handle type = own(H5Tcopy(file_type), H5Tclose);
  if (!type) object.fail(what + ": its string type cannot be copied" + hdf5_reason());
  if (H5Tis_variable_str(file_type) > 0) {
    std::vector<char*> pointers(static_cast<std::size_t>(count), nullptr);
    if (read(type.get(), pointers.data()) < 0) object.fail(what + " cannot be read" + hdf5_reason());
    result.reserve(pointers.size());
    for (const char* text : pointers) result.emplace_back(text == nullptr ? "" : text);
    H5Dvlen_reclaim(type.get(), space, H5P_DEFAULT, pointers.data());
    return result;
  }
  const std::size_t size = H5Tget_size(file_type);
  if (size == 0 || static_cast<std::int64_t>(size) > kMaxStringBytes) {
    object.fail(what + " holds strings of " + std::to_string(size) + " bytes, at most " + std::to_string(kMaxStringBytes) +
                " are accepted");
  }
  std::vector<char> bytes(size * static_cast<std::size_t>(count));
  if (read(type.get(), bytes.data()) < 0) object.fail(what + " cannot be read" + hdf5_reason());
  const H5T_str_t padding = H5Tget_strpad(file_type);
  for (std::int64_t i = 0; i < count; ++i) result.push_back(unpad(bytes.data() + static_cast<std::size_t>(i) * size, size, padding));
  return result;
}

// An open attribute with what reading it needs.
struct Attribute {
  Handle handle, type, space;
  std::int64_t count = 0;
};

Attribute open_attribute(const Object& object, hid_t id, const std::string& name, std::size_t rank) {
  if (!object.has_attribute(name)) object.fail("attribute `" + name + "` is missing");
  Attribute attribute;
  attribute.handle = own(H5Aopen(id, name.c_str(), H5P_DEFAULT), H5Aclose);
  if (!attribute.handle) object.fail("attribute `" + name + "` cannot be opened" + hdf5_reason());
  attribute.type = own(H5Aget_type(attribute.handle.get()), H5Tclose);
  attribute.space = own(H5Aget_space(attribute.handle.get()), H5Sclose);
  if (!attribute.type || !attribute.space) object.fail("attribute `" + name + "` has no readable type" + hdf5_reason());
  const std::optional<Extents> shape = extents_of(attribute.space.get());
  if (!shape || shape->size() != rank) {
    object.fail("attribute `" + name + "` is " +
                (shape ? "of rank " + std::to_string(shape->size()) : std::string("without a usable extent")) + ", expected " +
                (rank == 0 ? "a scalar" : "one dimension"));
  }
  const std::optional<std::int64_t> bytes = checked_product(*shape, static_cast<std::int64_t>(H5Tget_size(attribute.type.get())));
  if (!bytes || *bytes > kMaxStringBytes) object.fail("attribute `" + name + "` has the absurd extent " + shape_text(*shape));
  attribute.count = *checked_product(*shape, 1);
  return attribute;
}

std::vector<std::string> read_string_attribute(const Object& object, hid_t id, const std::string& name, std::size_t rank) {
  const Attribute attribute = open_attribute(object, id, name, rank);
  if (classify(attribute.type.get()) != ElementType::string) {
    object.fail("attribute `" + name + "` is " + describe(attribute.type.get()) + ", expected a string");
  }
  return read_strings(object, "attribute `" + name + "`", attribute.type.get(), attribute.space.get(), attribute.count,
                      [&](hid_t type, void* into) { return H5Aread(attribute.handle.get(), type, into); });
}

// Integers of any stored width, widened exactly: `Wide` is int64 or uint64 and a value outside it is refused.
template <class Wide>
std::vector<Wide> read_integer_attribute(const Object& object, hid_t id, const std::string& name, std::size_t rank) {
  const Attribute attribute = open_attribute(object, id, name, rank);
  const hid_t type = attribute.type.get();
  if (H5Tget_class(type) != H5T_INTEGER || H5Tget_size(type) > 8) {
    object.fail("attribute `" + name + "` is " + describe(type) + ", expected an integer");
  }
  const bool stored_signed = H5Tget_sign(type) != H5T_SGN_NONE;
  std::vector<std::uint64_t> raw(static_cast<std::size_t>(attribute.count));
  if (attribute.count > 0 && H5Aread(attribute.handle.get(), stored_signed ? H5T_NATIVE_INT64 : H5T_NATIVE_UINT64, raw.data()) < 0) {
    object.fail("attribute `" + name + "` cannot be read" + hdf5_reason());
  }
  std::vector<Wide> values;
  for (const std::uint64_t bits : raw) {
    const bool fits = std::is_signed_v<Wide> == stored_signed || static_cast<std::int64_t>(bits) >= 0;
    if (!fits) {
      object.fail("attribute `" + name + "` = " + (stored_signed ? std::to_string(static_cast<std::int64_t>(bits)) : std::to_string(bits)) +
                  (stored_signed ? " is negative" : " does not fit 63 bits"));
    }
    values.push_back(static_cast<Wide>(bits));
  }
  return values;
}

std::vector<double> read_double_attribute(const Object& object, hid_t id, const std::string& name, std::size_t rank) {
  const Attribute attribute = open_attribute(object, id, name, rank);
  const H5T_class_t kind = H5Tget_class(attribute.type.get());
  if ((kind != H5T_FLOAT && kind != H5T_INTEGER) || H5Tget_size(attribute.type.get()) > 8) {
    object.fail("attribute `" + name + "` is " + describe(attribute.type.get()) + ", expected a number");
  }
  std::vector<double> values(static_cast<std::size_t>(attribute.count));
  if (attribute.count > 0 && H5Aread(attribute.handle.get(), H5T_NATIVE_DOUBLE, values.data()) < 0) {
    object.fail("attribute `" + name + "` cannot be read" + hdf5_reason());
  }
  return values;
}

void write_attribute(const Object& object, hid_t id, const std::string& name, hid_t stored, hid_t memory, const Extents& shape,
                     const void* data) {
  if (object.has_attribute(name) && H5Adelete(id, name.c_str()) < 0)
    object.fail("attribute `" + name + "` cannot be replaced" + hdf5_reason());
  const Handle space = make_space(object, shape);
  const Handle attribute = own(H5Acreate2(id, name.c_str(), stored, space.get(), H5P_DEFAULT, H5P_DEFAULT), H5Aclose);
  if (!attribute || H5Awrite(attribute.get(), memory, data) < 0) object.fail("attribute `" + name + "` cannot be written" + hdf5_reason());
}

void write_string_attribute(const Object& object, hid_t id, const std::string& name, std::span<const std::string> texts,
                            const Extents& shape) {
  const Handle type = utf8_string_type();
  std::vector<const char*> pointers;
  for (const std::string& text : texts) pointers.push_back(text.c_str());
  write_attribute(object, id, name, type.get(), type.get(), shape, pointers.data());
}

std::uint64_t little_endian(const std::uint8_t* bytes, std::size_t count) {
  std::uint64_t value = 0;
  for (std::size_t i = 0; i < count; ++i) value |= std::uint64_t{bytes[i]} << (8 * i);
  return value;
}

// The library trusts the superblock more than a corrupt file deserves, so a file is looked at before it is opened.
void check_superblock(const std::filesystem::path& path) {
  const std::string name = path.string();
  std::error_code error;
  const std::filesystem::file_status status = std::filesystem::status(path, error);
  if (!std::filesystem::exists(status)) throw FileError(name + ": no such file");
  if (!std::filesystem::is_regular_file(status)) throw FileError(name + ": is not a regular file");
  const std::uint64_t size = std::filesystem::file_size(path, error);
  std::ifstream stream(path, std::ios::binary);
  if (error || !stream) throw FileError(name + ": cannot be opened for reading");
  std::array<std::uint8_t, 64> head{};
  stream.read(reinterpret_cast<char*>(head.data()), head.size());
  const auto found = static_cast<std::size_t>(stream.gcount());
  constexpr std::array<std::uint8_t, 8> kSignature{0x89, 'H', 'D', 'F', '\r', '\n', 0x1a, '\n'};
  if (found < kSignature.size() || !std::equal(kSignature.begin(), kSignature.end(), head.begin())) {
    throw FileError(name + ": is not an HDF5 file (its first 8 bytes are not the HDF5 signature)");
  }
  if (found < 48) throw FileError(name + ": is cut off inside the HDF5 superblock after " + std::to_string(found) + " bytes");
  // HDF5 File Format Specification, section II.A: versions 0 and 1 share a layout but for 4 bytes, 2 and 3 another.
  const unsigned version = head[8];
  if (version > 3) throw FileError(name + ": has HDF5 superblock version " + std::to_string(version) + ", versions 0 to 3 are known");
  const std::size_t sizes_at = version < 2 ? 13 : 9;
  if (head[sizes_at] != 8 || head[sizes_at + 1] != 8) {
    throw FileError(name + ": stores addresses of " + std::to_string(head[sizes_at]) + " and lengths of " +
                    std::to_string(head[sizes_at + 1]) + " bytes, only 8 and 8 are accepted");
  }
  const std::size_t base_at = version == 0 ? 24 : version == 1 ? 28 : 12;
  const std::size_t end_at = base_at + 16;
  if (little_endian(&head[base_at], 8) != 0) throw FileError(name + ": does not begin at its own byte 0 (HDF5 base address)");
  const std::uint64_t end = little_endian(&head[end_at], 8);
  if (end > size) {
    throw FileError(name + ": is truncated: its superblock declares " + std::to_string(end) + " bytes, the file has " +
                    std::to_string(size));
  }
}

// Refuses storage that could read elsewhere, run code, or allocate what the file's bytes cannot account for. Returns the number of elements.
std::int64_t check_storage(const Dataset& dataset, hid_t id, const Extents& shape, std::int64_t element_bytes) {
  const Handle plist = own(H5Dget_create_plist(id), H5Pclose);
  if (!plist) dataset.fail("its storage description cannot be read" + hdf5_reason());
  const H5D_layout_t layout = H5Pget_layout(plist.get());
  if (layout != H5D_COMPACT && layout != H5D_CONTIGUOUS && layout != H5D_CHUNKED) dataset.fail("has a virtual or unknown storage layout");
  if (H5Pget_external_count(plist.get()) != 0) dataset.fail("keeps its data in another file, which is not accepted");
  const int filters = H5Pget_nfilters(plist.get());
  for (int i = 0; i < filters; ++i) {
    unsigned flags = 0, config = 0;
    std::size_t values = 0;
    const H5Z_filter_t filter = H5Pget_filter2(plist.get(), static_cast<unsigned>(i), &flags, &values, nullptr, 0, nullptr, &config);
    if (filter != H5Z_FILTER_DEFLATE && filter != H5Z_FILTER_SHUFFLE && filter != H5Z_FILTER_FLETCHER32) {
      dataset.fail("uses HDF5 filter " + std::to_string(filter) + ", only deflate, shuffle and fletcher32 are accepted");
    }
  }

  const std::optional<std::int64_t> bytes = checked_product(shape, element_bytes);
  if (!bytes) dataset.fail("has the absurd extent " + shape_text(shape));
  const std::int64_t count = *bytes / std::max<std::int64_t>(1, element_bytes);
  if (count == 0) return 0;
  hsize_t file_bytes = std::numeric_limits<hsize_t>::max();
  if (*bytes > kAlwaysAllocated) {
    const Handle file = own(H5Iget_file_id(id), H5Fclose);
    if (!file || H5Fget_filesize(file.get(), &file_bytes) < 0) dataset.fail("belongs to a file whose size cannot be read" + hdf5_reason());
  }
  const hsize_t stored = H5Dget_storage_size(id);
  if (stored == 0) dataset.fail("is declared with extent " + shape_text(shape) + " but holds no data");
  const bool absurd =
      stored > file_bytes || *bytes > static_cast<std::int64_t>(stored) * (layout == H5D_CHUNKED && filters > 0 ? kDeflateExpansion : 1);
  // A chunked dataset may have whole chunks missing, which read as the fill value; nothing here writes such files.
  if (absurd) {
    dataset.fail("claims extent " + shape_text(shape) + " (" + std::to_string(*bytes) + " bytes) but the file stores " +
                 std::to_string(stored) + " bytes for it");
  }
  if (layout == H5D_CHUNKED) {
    std::array<hsize_t, H5S_MAX_RANK> chunk{};
    const int rank = H5Pget_chunk(plist.get(), H5S_MAX_RANK, chunk.data());
    Extents extents;
    for (int axis = 0; axis < rank; ++axis) extents.push_back(static_cast<std::int64_t>(chunk[static_cast<std::size_t>(axis)]));
    const std::optional<std::int64_t> chunk_bytes = checked_product(extents, element_bytes);
    if (rank < 0 || !chunk_bytes || *chunk_bytes > std::max(kMinChunkAllowance, static_cast<std::int64_t>(stored) * kDeflateExpansion)) {
      dataset.fail("is cut into chunks larger than its stored bytes can account for");
    }
  }
  return count;
}

Extents choose_chunk(const Extents& shape, std::int64_t element_bytes) {
  Extents chunk = shape;
  // Halve the slowest axes first: a chunk then holds whole rows, which is how the tensors are read.
  for (std::int64_t& extent : chunk) {
    while (extent > 1 && *checked_product(chunk, element_bytes) > kChunkBytes) extent = (extent + 1) / 2;
  }
  return chunk;
}

}  // namespace

std::string_view to_string(ElementType type) {
  switch (type) {
    case ElementType::int32:
      return "int32";
    case ElementType::int64:
      return "int64";
    case ElementType::uint8:
      return "uint8";
    case ElementType::float32:
      return "float32";
    case ElementType::float64:
      return "float64";
    case ElementType::string:
      return "string";
    case ElementType::other:
      break;
  }
  return "another type";
}

// ---- Object ----------------------------------------------------------------------------------------------------------------

void Object::fail(const std::string& what) const { throw FileError(where() + ": " + what); }

std::vector<std::string> Object::attribute_names() const {
  std::vector<std::string> names;
  hsize_t index = 0;
  const herr_t status = H5Aiterate2(
      id(), H5_INDEX_NAME, H5_ITER_NATIVE, &index,
      [](hid_t, const char* name, const H5A_info_t*, void* out) -> herr_t {
        static_cast<std::vector<std::string>*>(out)->emplace_back(name);
        return 0;
      },
      &names);
  if (status < 0) fail("its attributes cannot be listed" + hdf5_reason());
  std::sort(names.begin(), names.end());
  return names;
}

bool Object::has_attribute(const std::string& name) const {
  const htri_t exists = H5Aexists(id(), name.c_str());
  if (exists < 0) fail("its attributes cannot be read" + hdf5_reason());
  return exists > 0;
}

void Object::allow_only_attributes(std::span<const std::string_view> attributes) const {
  for (const std::string& name : attribute_names()) {
    if (std::find(attributes.begin(), attributes.end(), name) == attributes.end()) fail("has the unknown attribute `" + name + "`");
  }
}

std::string Object::string_attribute(const std::string& name) const { return read_string_attribute(*this, id(), name, 0).front(); }
std::int64_t Object::int_attribute(const std::string& name) const {
  return read_integer_attribute<std::int64_t>(*this, id(), name, 0).front();
}
std::uint64_t Object::uint_attribute(const std::string& name) const {
  return read_integer_attribute<std::uint64_t>(*this, id(), name, 0).front();
}
double Object::double_attribute(const std::string& name) const { return read_double_attribute(*this, id(), name, 0).front(); }
std::vector<std::int64_t> Object::int_array_attribute(const std::string& name) const {
  return read_integer_attribute<std::int64_t>(*this, id(), name, 1);
}
std::vector<double> Object::double_array_attribute(const std::string& name) const { return read_double_attribute(*this, id(), name, 1); }
std::vector<std::string> Object::string_array_attribute(const std::string& name) const {
  return read_string_attribute(*this, id(), name, 1);
}

void Object::set_attribute(const std::string& name, std::string_view text) const {
  const std::string copy(text);
  write_string_attribute(*this, id(), name, {&copy, 1}, {});
}
void Object::set_attribute(const std::string& name, std::int64_t value) const {
  write_attribute(*this, id(), name, H5T_STD_I64LE, H5T_NATIVE_INT64, {}, &value);
}
void Object::set_attribute(const std::string& name, std::uint64_t value) const {
  write_attribute(*this, id(), name, H5T_STD_U64LE, H5T_NATIVE_UINT64, {}, &value);
}
void Object::set_attribute(const std::string& name, double value) const {
  write_attribute(*this, id(), name, H5T_IEEE_F64LE, H5T_NATIVE_DOUBLE, {}, &value);
}
void Object::set_attribute(const std::string& name, std::span<const std::int64_t> values) const {
  write_attribute(*this, id(), name, H5T_STD_I64LE, H5T_NATIVE_INT64, {static_cast<std::int64_t>(values.size())}, values.data());
}
void Object::set_attribute(const std::string& name, std::span<const double> values) const {
  write_attribute(*this, id(), name, H5T_IEEE_F64LE, H5T_NATIVE_DOUBLE, {static_cast<std::int64_t>(values.size())}, values.data());
}
void Object::set_attribute(const std::string& name, std::span<const std::string> values) const {
  write_string_attribute(*this, id(), name, values, {static_cast<std::int64_t>(values.size())});
}

// ---- Dataset ---------------------------------------------------------------------------------------------------------------

ElementType Dataset::type() const {
  const Handle type = own(H5Dget_type(id()), H5Tclose);
  if (!type) fail("its element type cannot be read" + hdf5_reason());
  return classify(type.get());
}

std::vector<std::int64_t> Dataset::shape() const {
  const Handle space = own(H5Dget_space(id()), H5Sclose);
  const std::optional<Extents> shape = space ? extents_of(space.get()) : std::nullopt;
  if (!shape) fail("has no usable extent" + hdf5_reason());
  return *shape;
}

std::int64_t Dataset::element_count() const {
  const std::optional<std::int64_t> count = checked_product(shape(), 1);
  if (!count) fail("has the absurd extent " + shape_text(shape()));
  return *count;
}

template <class T>
Tensor<T> Dataset::read() const {
  return read_as<T>(nullptr);
}

template <class T>
Tensor<T> Dataset::read(const std::vector<std::int64_t>& expected_shape) const {
  return read_as<T>(&expected_shape);
}

template <class T>
Tensor<T> Dataset::read_as(const std::vector<std::int64_t>* expected_shape) const {
  const Handle type = own(H5Dget_type(id()), H5Tclose);
  if (!type) fail("its type cannot be read" + hdf5_reason());
  if (classify(type.get()) != element_type<T>())
    fail("is " + describe(type.get()) + ", expected " + std::string(to_string(element_type<T>())));
  Tensor<T> tensor;
  tensor.shape = shape();
  if (expected_shape != nullptr) {
    const bool equal = std::equal(tensor.shape.begin(), tensor.shape.end(), expected_shape->begin(), expected_shape->end(),
                                  [](std::int64_t extent, std::int64_t wanted) { return wanted < 0 || wanted == extent; });
    if (!equal) fail("has extent " + shape_text(tensor.shape) + ", expected " + shape_text(*expected_shape));
  }
  const std::int64_t count = check_storage(*this, id(), tensor.shape, static_cast<std::int64_t>(H5Tget_size(type.get())));
  if constexpr (std::is_same_v<T, std::string>) {
    const Handle space = own(H5Dget_space(id()), H5Sclose);
    if (!space) fail("its extent cannot be read" + hdf5_reason());
    const bool variable = H5Tis_variable_str(type.get()) > 0;
    StringBudget budget{static_cast<std::size_t>(64 * kMaxStringBytes)};
    const Handle transfer = variable ? string_transfer(budget) : Handle();
    const hid_t properties = variable ? transfer.get() : H5P_DEFAULT;
    tensor.data = read_strings(*this, "the dataset", type.get(), space.get(), count, [this, properties, &budget](hid_t memory, void* into) {
      const herr_t status = H5Dread(id(), memory, H5S_ALL, H5S_ALL, properties, into);
      if (budget.exceeded) fail("holds more than " + std::to_string(64 * kMaxStringBytes) + " bytes of strings, which is too much");
      return status;
    });
  } else {
    tensor.data.resize(static_cast<std::size_t>(count));
    if (count > 0 && H5Dread(id(), memory_type(element_type<T>()), H5S_ALL, H5S_ALL, H5P_DEFAULT, tensor.data.data()) < 0) {
      fail("cannot be read" + hdf5_reason());
    }
  }
  return tensor;
}

void Dataset::make_scale(const std::string& name) const {
  if (H5DSset_scale(id(), name.c_str()) < 0) fail("cannot be made a dimension scale" + hdf5_reason());
}

// The attributes of the specification of dimension scales (HDF5 High Level, H5DS).
void Dataset::take_scale(const Dataset& scale) const {
  const Handle references = own(H5Tvlen_create(H5T_STD_REF_OBJ), H5Tclose);
  const Handle one = make_space(*this, {1});
  hobj_ref_t reference{};
  hvl_t list{1, &reference};
  const bool good = references && H5Rcreate(&reference, scale.id(), ".", H5R_OBJECT, -1) >= 0;
  const Handle attribute = own(H5Acreate2(id(), "DIMENSION_LIST", references.get(), one.get(), H5P_DEFAULT, H5P_DEFAULT), H5Aclose);
  if (!good || !attribute || H5Awrite(attribute.get(), references.get(), &list) < 0) {
    fail("cannot take " + scale.path() + " as the scale of its first axis" + hdf5_reason());
  }
}

void Dataset::list_users(std::span<const Dataset> datasets) const {
  if (datasets.empty()) return;
  struct User {
    hobj_ref_t dataset;
    int axis;
  };
  const Handle user = own(H5Tcreate(H5T_COMPOUND, sizeof(User)), H5Tclose);
  bool good = user && H5Tinsert(user.get(), "dataset", HOFFSET(User, dataset), H5T_STD_REF_OBJ) >= 0 &&
              H5Tinsert(user.get(), "dimension", HOFFSET(User, axis), H5T_NATIVE_INT) >= 0;
  std::vector<User> users(datasets.size());
  for (std::size_t i = 0; i < users.size(); ++i) good = good && H5Rcreate(&users[i].dataset, datasets[i].id(), ".", H5R_OBJECT, -1) >= 0;
  const Handle all = make_space(*this, {static_cast<std::int64_t>(users.size())});
  const Handle attribute = own(H5Acreate2(id(), "REFERENCE_LIST", user.get(), all.get(), H5P_DEFAULT, H5P_DEFAULT), H5Aclose);
  if (!good || !attribute || H5Awrite(attribute.get(), user.get(), users.data()) < 0) {
    fail("its users cannot be listed" + hdf5_reason());
  }
}

// ---- Group -----------------------------------------------------------------------------------------------------------------

std::vector<std::string> Group::members() const {
  struct Listing {
    std::vector<std::string> names;
    std::string not_hard;
  } listing;
  hsize_t index = 0;
  const herr_t status = H5Literate(
      id(), H5_INDEX_NAME, H5_ITER_NATIVE, &index,
      [](hid_t, const char* name, const H5L_info_t* info, void* out) -> herr_t {
        auto& result = *static_cast<Listing*>(out);
        if (info->type != H5L_TYPE_HARD && result.not_hard.empty()) result.not_hard = name;
        result.names.emplace_back(name);
        return 0;
      },
      &listing);
  if (status < 0) fail("its members cannot be listed" + hdf5_reason());
  if (!listing.not_hard.empty()) fail("member `" + listing.not_hard + "` is a soft or external link, which is not accepted");
  const auto is_number = [](const std::string& name) { return !name.empty() && name.find_first_not_of("0123456789") == std::string::npos; };
  std::sort(listing.names.begin(), listing.names.end(), [&](const std::string& a, const std::string& b) {
    if (is_number(a) && is_number(b) && a.size() != b.size()) return a.size() < b.size();
    return a < b;
  });
  return listing.names;
}

bool Group::has(const std::string& name) const {
  if (name.empty() || name.find('/') != std::string::npos || name == ".") return false;
  H5L_info_t info;
  if (H5Lget_info(id(), name.c_str(), &info, H5P_DEFAULT) < 0) {
    const std::string reason = hdf5_reason();
    const htri_t exists = H5Lexists(id(), name.c_str(), H5P_DEFAULT);
    if (exists == 0) return false;
    fail(exists < 0 ? "its members cannot be read" + hdf5_reason() : "member `" + name + "` cannot be read" + reason);
  }
  if (info.type != H5L_TYPE_HARD) fail("member `" + name + "` is a soft or external link, which is not accepted");
  return true;
}

namespace {

// Opens whatever a hard link leads to; its kind decides what it may be used as.
Handle open_object(const Group& group, hid_t id, const std::string& name, const char* expected) {
  if (!group.has(name)) group.fail("has no member `" + name + "`, expected " + expected);
  Handle object = own(H5Oopen(id, name.c_str(), H5P_DEFAULT), H5Oclose);
  if (!object) group.fail("member `" + name + "` cannot be opened" + hdf5_reason());
  return object;
}

}  // namespace

bool Group::has_group(const std::string& name) const {
  return has(name) && H5Iget_type(open_object(*this, id(), name, "a group").get()) == H5I_GROUP;
}

bool Group::has_dataset(const std::string& name) const {
  return has(name) && H5Iget_type(open_object(*this, id(), name, "a dataset").get()) == H5I_DATASET;
}

Group Group::open_group(const std::string& name) const {
  Handle object = open_object(*this, id(), name, "a group");
  Group group(std::move(object), file_, join(path_, name));
  if (H5Iget_type(group.id()) != H5I_GROUP) group.fail("is not a group");
  return group;
}

Dataset Group::open_dataset(const std::string& name) const {
  Handle object = open_object(*this, id(), name, "a dataset");
  Dataset dataset(std::move(object), file_, join(path_, name));
  if (H5Iget_type(dataset.id()) != H5I_DATASET) dataset.fail("is not a dataset");
  return dataset;
}

Group Group::create_group(const std::string& name) const {
  Handle plist = own(H5Pcreate(H5P_GROUP_CREATE), H5Pclose);
  // Without modification times equal content is equal bytes.
  if (!plist || H5Pset_obj_track_times(plist.get(), false) < 0) throw InternalError("HDF5 layer: group properties" + hdf5_reason());
  Handle group = own(H5Gcreate2(id(), name.c_str(), H5P_DEFAULT, plist.get(), H5P_DEFAULT), H5Gclose);
  if (!group) fail("member `" + name + "` cannot be created" + hdf5_reason());
  return Group(std::move(group), file_, join(path_, name));
}

Group Group::require_group(const std::string& name) const {
  const std::size_t slash = name.find('/');
  const std::string first = name.substr(0, slash);
  Group group = has(first) ? open_group(first) : create_group(first);
  return slash == std::string::npos ? group : group.require_group(name.substr(slash + 1));
}

template <class T>
Dataset Group::write(const std::string& name, std::span<const T> values, const std::vector<std::int64_t>& shape,
                     const Storage& storage) const {
  constexpr bool kStrings = std::is_same_v<T, std::string>;
  const std::string path = join(path_, name);
  const std::optional<std::int64_t> count = checked_product(shape, 1);
  if (!count || *count != static_cast<std::int64_t>(values.size())) {
    throw InternalError("HDF5 layer: " + path + " of extent " + shape_text(shape) + " given " + std::to_string(values.size()) + " values");
  }
  const Handle string_type = kStrings ? utf8_string_type() : Handle();
  const hid_t stored = kStrings ? string_type.get() : stored_type(element_type<T>());
  const hid_t memory = kStrings ? string_type.get() : memory_type(element_type<T>());

  const Handle plist = own(H5Pcreate(H5P_DATASET_CREATE), H5Pclose);
  bool good = plist && H5Pset_obj_track_times(plist.get(), false) >= 0;
  if (storage.deflate > 0 && *count > 0 && !shape.empty()) {
    const Extents extents = storage.chunk.empty() ? choose_chunk(shape, static_cast<std::int64_t>(H5Tget_size(stored))) : storage.chunk;
    const std::vector<hsize_t> chunk(extents.begin(), extents.end());
    good = good && H5Pset_chunk(plist.get(), static_cast<int>(chunk.size()), chunk.data()) >= 0;
    if (!kStrings) good = good && H5Pset_shuffle(plist.get()) >= 0;
    good = good && H5Pset_deflate(plist.get(), static_cast<unsigned>(storage.deflate)) >= 0;
  }
  if (!good) throw InternalError("HDF5 layer: storage of " + path + hdf5_reason());

  const Handle space = make_space(*this, shape);
  Handle id_handle = own(H5Dcreate2(id(), name.c_str(), stored, space.get(), H5P_DEFAULT, plist.get(), H5P_DEFAULT), H5Dclose);
  if (!id_handle) fail("dataset `" + name + "` cannot be created" + hdf5_reason());
  Dataset dataset(std::move(id_handle), file_, path);
  herr_t status = 0;
  if constexpr (kStrings) {
    std::vector<const char*> pointers;
    for (const std::string& text : values) pointers.push_back(text.c_str());
    const Handle transfer = string_transfer();
    if (*count > 0) status = H5Dwrite(dataset.id(), memory, H5S_ALL, H5S_ALL, transfer.get(), pointers.data());
  } else {
    if (*count > 0) status = H5Dwrite(dataset.id(), memory, H5S_ALL, H5S_ALL, H5P_DEFAULT, values.data());
  }
  if (status < 0) dataset.fail("cannot be written" + hdf5_reason());
  return dataset;
}

void Group::allow_only(std::span<const std::string_view> allowed_members, std::span<const std::string_view> allowed_attributes) const {
  for (const std::string& name : members()) {
    if (std::find(allowed_members.begin(), allowed_members.end(), name) == allowed_members.end())
      fail("has the unknown member `" + name + "`");
  }
  allow_only_attributes(allowed_attributes);
}

// ---- File ------------------------------------------------------------------------------------------------------------------

namespace {

Handle file_access() {
  Handle access = own(H5Pcreate(H5P_FILE_ACCESS), H5Pclose);
  if (!access) throw InternalError("HDF5 layer: file access properties" + hdf5_reason());
#if H5_VERSION_GE(1, 10, 7)
  // Read-only media and network file systems often cannot lock. Published files do not change and new ones have a name of their own.
  H5Pset_file_locking(access.get(), false, true);
#endif
  return access;
}

}  // namespace

File::File(Handle handle, std::filesystem::path path)
    : handle_(std::move(handle)), name_(std::make_shared<const std::string>(path.string())) {}

File File::open_readonly(const std::filesystem::path& path, Trust trust) {
  prepare_library();
  check_superblock(path);
  if (trust == Trust::unknown) probe_in_child(path);
  const Handle access = file_access();
  Handle handle = own(H5Fopen(path.c_str(), H5F_ACC_RDONLY, access.get()), H5Fclose);
  if (!handle) throw FileError(path.string() + ": is not a readable HDF5 file" + hdf5_reason());
  return File(std::move(handle), path);
}

File File::create(const std::filesystem::path& path, FileFormat format) { return create(path, format, path); }

File File::create(const AtomicOutput& output, FileFormat format) { return create(output.temporary(), format, output.destination()); }

File File::create(const std::filesystem::path& path, FileFormat format, const std::filesystem::path& name) {
  prepare_library();
  const Handle creation = own(H5Pcreate(H5P_FILE_CREATE), H5Pclose);
  if (!creation || H5Pset_obj_track_times(creation.get(), false) < 0) throw InternalError("HDF5 layer: file properties" + hdf5_reason());
  const Handle access = file_access();
  if (format == FileFormat::compact && H5Pset_libver_bounds(access.get(), H5F_LIBVER_V110, H5F_LIBVER_V110) < 0) {
    throw InternalError("HDF5 layer: file format" + hdf5_reason());
  }
  Handle handle = own(H5Fcreate(path.c_str(), H5F_ACC_TRUNC, creation.get(), access.get()), H5Fclose);
  if (!handle) throw FileError(name.string() + ": cannot be created" + hdf5_reason());
  File file(std::move(handle), name);
  file.writable_ = true;
  return file;
}

Group File::root() const {
  Handle handle = own(H5Gopen2(handle_.get(), "/", H5P_DEFAULT), H5Gclose);
  if (!handle) throw FileError(*name_ + ": its root group cannot be opened" + hdf5_reason());
  return Group(std::move(handle), name_, "/");
}

void File::close() {
  if (!handle_) return;
  if (H5Fget_obj_count(handle_.get(), H5F_OBJ_ALL) != 1) throw InternalError("HDF5 layer: " + *name_ + " closed with open objects");
  if (writable_ && H5Fflush(handle_.get(), H5F_SCOPE_GLOBAL) < 0) throw FileError(*name_ + ": cannot be written" + hdf5_reason());
  handle_ = Handle();
}

template Tensor<std::int32_t> Dataset::read() const;
template Tensor<std::int64_t> Dataset::read() const;
template Tensor<std::uint8_t> Dataset::read() const;
template Tensor<float> Dataset::read() const;
template Tensor<double> Dataset::read() const;
template Tensor<std::string> Dataset::read() const;
template Tensor<std::int32_t> Dataset::read(const std::vector<std::int64_t>&) const;
template Tensor<std::int64_t> Dataset::read(const std::vector<std::int64_t>&) const;
template Tensor<std::uint8_t> Dataset::read(const std::vector<std::int64_t>&) const;
template Tensor<float> Dataset::read(const std::vector<std::int64_t>&) const;
template Tensor<double> Dataset::read(const std::vector<std::int64_t>&) const;
template Tensor<std::string> Dataset::read(const std::vector<std::int64_t>&) const;
template Dataset Group::write(const std::string&, std::span<const std::int32_t>, const std::vector<std::int64_t>&, const Storage&) const;
template Dataset Group::write(const std::string&, std::span<const std::int64_t>, const std::vector<std::int64_t>&, const Storage&) const;
template Dataset Group::write(const std::string&, std::span<const std::uint8_t>, const std::vector<std::int64_t>&, const Storage&) const;
template Dataset Group::write(const std::string&, std::span<const float>, const std::vector<std::int64_t>&, const Storage&) const;
template Dataset Group::write(const std::string&, std::span<const double>, const std::vector<std::int64_t>&, const Storage&) const;
template Dataset Group::write(const std::string&, std::span<const std::string>, const std::vector<std::int64_t>&, const Storage&) const;

}  // namespace loopgauge::harness::h5

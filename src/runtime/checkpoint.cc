#include "runtime/checkpoint.h"

#include <ATen/ATen.h>
#include <torch/csrc/jit/serialization/unpickler.h>

#include <array>
#include <cstring>
#include <map>
#include <stdexcept>

#include "core/error.h"

namespace motley {

namespace {

[[noreturn]] void damaged(const std::string& why) { throw std::runtime_error(why); }

// CRC-32 as zip has it.
uint32_t checksum(const char* data, size_t size) {
  static const std::array<uint32_t, 256> table = [] {
    std::array<uint32_t, 256> t{};
    for (uint32_t i = 0; i < 256; ++i) {
      t[i] = i;
      for (int bit = 0; bit < 8; ++bit) t[i] = (t[i] >> 1) ^ (t[i] & 1 ? 0xedb88320u : 0);
    }
    return t;
  }();
  uint32_t crc = ~0u;
  for (size_t i = 0; i < size; ++i)
    crc = (crc >> 8) ^ table[(crc ^ static_cast<unsigned char>(data[i])) & 0xff];
  return ~crc;
}

// Little-endian numbers within bounds.
class LittleEndian {
 public:
  explicit LittleEndian(const std::string& all) : all_(all) {}
  uint64_t number(uint64_t at, int size) const {
    need(at, static_cast<uint64_t>(size));
    uint64_t value = 0;
    for (int i = size; i-- > 0;)
      value = value << 8 | static_cast<unsigned char>(all_[at + static_cast<uint64_t>(i)]);
    return value;
  }
  std::string text(uint64_t at, uint64_t size) const {
    need(at, size);
    return all_.substr(at, size);
  }
  void need(uint64_t at, uint64_t size) const {
    if (at > all_.size() || size > all_.size() - at) damaged("it is cut short");
  }

 private:
  const std::string& all_;
};

struct Record {
  uint64_t begin = 0, size = 0;
};

// The records of a zip archive whose records are stored as they are, checked.
std::map<std::string, Record> records_of(const std::string& file) {
  const LittleEndian bytes(file);
  constexpr uint64_t kEnd = 22;
  if (file.size() < kEnd) damaged("it is cut short");
  uint64_t end = file.size() - kEnd;  // of the directory: "PK\5\6", and a comment behind
  while (bytes.number(end, 4) != 0x06054b50) {
    if (end == 0 || file.size() - end > kEnd + 65535) damaged("it has no directory");
    --end;
  }
  uint64_t count = bytes.number(end + 10, 2), at = bytes.number(end + 16, 4);
  if ((count == 0xffff || at == 0xffffffff) && end >= 20 &&
      bytes.number(end - 20, 4) == 0x07064b50) {
    const uint64_t large = bytes.number(end - 12, 8);
    if (bytes.number(large, 4) != 0x06064b50) damaged("its directory is not where it says");
    count = bytes.number(large + 32, 8);
    at = bytes.number(large + 48, 8);
  }
  const uint64_t directory = at;
  std::map<std::string, Record> records;
  for (uint64_t i = 0; i < count; ++i) {
    if (bytes.number(at, 4) != 0x02014b50) damaged("its directory is damaged");
    const uint64_t method = bytes.number(at + 10, 2), crc = bytes.number(at + 16, 4),
                   name_size = bytes.number(at + 28, 2), extra_size = bytes.number(at + 30, 2),
                   comment = bytes.number(at + 32, 2);
    uint64_t packed = bytes.number(at + 20, 4), size = bytes.number(at + 24, 4),
             header = bytes.number(at + 42, 4);
    const std::string name = bytes.text(at + 46, name_size);
    // Numbers of 64 bits stand behind the name, in this order.
    for (uint64_t e = at + 46 + name_size; e + 4 <= at + 46 + name_size + extra_size;) {
      const uint64_t kind = bytes.number(e, 2), length = bytes.number(e + 2, 2);
      uint64_t next = e + 4;
      if (kind == 1)
        for (uint64_t* field : {&size, &packed, &header})
          if (*field == 0xffffffff) *field = bytes.number(next, 8), next += 8;
      e += 4 + length;
    }
    at += 46 + name_size + extra_size + comment;
    if (method != 0 || packed != size) damaged("record " + name + " is compressed");
    if (bytes.number(header, 4) != 0x04034b50) damaged("record " + name + " is not where it says");
    const uint64_t begin =
        header + 30 + bytes.number(header + 26, 2) + bytes.number(header + 28, 2);
    bytes.need(begin, size);
    if (begin + size > directory) damaged("record " + name + " is longer than its place");
    if (checksum(file.data() + begin, size) != crc)
      damaged("record " + name + " does not have its checksum");
    if (!records.try_emplace(name, Record{begin, size}).second)
      damaged("record " + name + " is there twice");
  }
  return records;
}

// Every tensor of a value lies within the record that it is of. `sizes`: bytes by address.
void check_tensors(const c10::IValue& value, const std::map<const void*, size_t>& sizes) {
  if (value.isTensor()) {
    const at::Tensor& t = value.toTensor();
    if (!t.defined()) damaged("a tensor is missing");
    const auto it = sizes.find(t.storage().data());
    const size_t size = it == sizes.end() ? 0 : it->second;
    double last = static_cast<double>(t.storage_offset());
    bool wrong = t.storage_offset() < 0 || t.storage().nbytes() > size;
    for (int64_t d = 0; d < t.dim(); ++d) {
      wrong = wrong || t.size(d) < 0 || t.stride(d) < 0;
      last += static_cast<double>(t.size(d) - 1) * static_cast<double>(t.stride(d));
    }
    wrong = wrong || (t.numel() > 0 && (last + 1) * static_cast<double>(t.itemsize()) >
                                           static_cast<double>(t.storage().nbytes()));
    if (wrong) damaged("a tensor is larger than its record");
  } else if (value.isGenericDict()) {
    for (const auto& item : value.toGenericDict()) check_tensors(item.value(), sizes);
  } else if (value.isList()) {
    for (const c10::IValue& item : value.toListRef()) check_tensors(item, sizes);
  } else if (value.isTuple()) {
    for (const c10::IValue& item : value.toTupleRef().elements()) check_tensors(item, sizes);
  }
}

}  // namespace

c10::IValue read_archive(const std::string& bytes) {
  const std::map<std::string, Record> records = records_of(bytes);
  std::string folder;
  for (const auto& [name, record] : records)
    if (name.ends_with("/data.pkl")) folder = name.substr(0, name.size() - 8);
  if (folder.empty()) damaged("it holds no value");
  const Record pickle = records.at(folder + "data.pkl");
  size_t read = 0;
  const auto reader = [&](char* into, size_t size) {
    const size_t n = std::min(size, static_cast<size_t>(pickle.size) - read);
    std::memcpy(into, bytes.data() + pickle.begin + read, n);
    read += n;
    return n;
  };
  std::map<const void*, size_t> sizes;
  const auto record = [&](const std::string& name) {
    const auto it = records.find(folder + "data/" + name);
    if (it == records.end()) damaged("record " + name + " is missing");
    at::DataPtr data = at::getCPUAllocator()->allocate(it->second.size);
    if (it->second.size > 0)
      std::memcpy(data.get(), bytes.data() + it->second.begin, it->second.size);
    sizes[data.get()] = it->second.size;
    return data;
  };
  // Without a resolver of types there is none but those of plain values.
  torch::jit::Unpickler unpickler(reader, nullptr, nullptr, record, c10::nullopt);
  c10::IValue value = unpickler.parse_ivalue();
  check_tensors(value, sizes);
  return value;
}

}  // namespace motley

// yaml-cpp behind functions of C: what calls them may be compiled with another layout of
// std::string than the library (yaml.h).
#pragma once

#include <stddef.h>

extern "C" {

// Hears a document: begin_map, key, its value, key, its value, ..., end.
struct YamlListener {
  void* self;
  void (*begin_map)(void* self);
  void (*begin_list)(void* self);
  void (*end)(void* self);
  void (*key)(void* self, const char* text, size_t size);
  void (*scalar)(void* self, const char* text, size_t size);
  void (*null)(void* self);
};
// The first document of a text. 0, or what is wrong in `why`, one line, cut to `room`.
int yaml_read(const char* text, size_t size, const YamlListener* listener, char* why, size_t room);

struct YamlEmitter;
struct YamlEmitter* yaml_emitter(void);
void yaml_begin(struct YamlEmitter* to, bool map, bool flow);
void yaml_end(struct YamlEmitter* to, bool map);
void yaml_key(struct YamlEmitter* to, const char* text, size_t size);
void yaml_scalar(struct YamlEmitter* to, const char* text, size_t size);
const char* yaml_text(struct YamlEmitter* of);
void yaml_free(struct YamlEmitter* of);

}  // extern "C"

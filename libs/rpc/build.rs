//! Generates the gRPC services. Messages of A2A come from `rialto-a2a`; only those of the internal
//! contracts are made here.

use prost::Message as _;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../proto");
    println!("cargo:rerun-if-changed={}", root.display());
    let mut compiler = protox::Compiler::new([&root])?;
    compiler.include_imports(true);
    compiler.open_files(["a2a/v1/a2a.proto", "rialto/tasks/v1/tasks.proto", "rialto/tasks/v1/admin.proto"])?;
    let descriptors = prost_types::FileDescriptorSet::decode(compiler.encode_file_descriptor_set().as_slice())?;

    let mut config = tonic_prost_build::Config::new();
    config.btree_map(["."]).bytes(["."]).compile_well_known_types();
    let mut builder = tonic_prost_build::configure();
    // What an operator is told has a JSON form: that of its fields.
    let admin = descriptors.file.iter().filter(|file| file.name() == "rialto/tasks/v1/admin.proto");
    for message in admin.flat_map(|file| &file.message_type) {
        let path = format!(".rialto.tasks.v1.{}", message.name());
        builder = builder.type_attribute(&path, "#[derive(serde::Serialize, serde::Deserialize)]");
        builder = builder.type_attribute(&path, "#[serde(rename_all = \"camelCase\", default)]");
    }
    builder
        .extern_path(".google.protobuf", "::rialto_a2a::wkt")
        .extern_path(".lf.a2a.v1", "::rialto_a2a::v1")
        .compile_fds_with_config(descriptors, config)?;
    Ok(())
}

//! gRPC between the services of Rialto, and the generated code of the official A2A binding.
//!
//! In one process or in many, services talk through the same generated clients: a client is generic over its
//! [`Transport`], which is either a server in the same process or a network channel. Knows no service and no
//! store; errors cross a hop as `google.rpc.Status` (see `rialto_a2a::Error::to_status`).

mod identity;
mod network;
mod trace;
mod transport;

pub use identity::{Identity, Unfit};
pub use network::Target;
pub use trace::Traced;
pub use transport::{MAX_MESSAGE_BYTES, Transport};

/// The official gRPC binding: `lf.a2a.v1.A2AService`.
#[expect(clippy::allow_attributes, reason = "generated code")]
pub mod a2a {
    tonic::include_proto!("lf.a2a.v1");
}

/// The contract of task-store.
#[expect(clippy::allow_attributes, reason = "generated code")]
pub mod tasks {
    use super::{MAX_MESSAGE_BYTES, Traced, Transport};

    tonic::include_proto!("rialto.tasks.v1");

    /// A client of task-store, whatever it is reached by.
    pub type TaskStoreClient = task_store_client::TaskStoreClient<Transport>;

    /// A client of task-store for its operators.
    pub type AdminClient = admin_client::AdminClient<Transport>;

    /// A server of task-store, as [`server`] makes it.
    pub type Server<T> = Traced<task_store_server::TaskStoreServer<T>>;

    /// Makes a client with the message limits that all of Rialto uses.
    #[must_use]
    pub fn client(transport: Transport) -> TaskStoreClient {
        TaskStoreClient::new(transport)
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES)
    }

    /// The same for operators.
    #[must_use]
    pub fn admin_client(transport: Transport) -> AdminClient {
        AdminClient::new(transport)
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES)
    }

    /// Makes a server with the message limits that all of Rialto uses.
    #[must_use]
    pub fn server<T: task_store_server::TaskStore>(service: T) -> Server<T> {
        let server = task_store_server::TaskStoreServer::new(service)
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES);
        Traced::new(server)
    }

    /// The same for operators.
    #[must_use]
    pub fn admin_server<T: admin_server::Admin>(service: T) -> admin_server::AdminServer<T> {
        admin_server::AdminServer::new(service)
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES)
    }
}
